"""torch's pipeline stage for torch 2.11 and 2.12, with the behaviour of `PipelineStage` from torch 2.13 on.

                        stage 0 (frozen)    stage 1               stage 2
    activation          a ───────────────►  a, b ──────────────►  …
    its gradient        none                b ◄─────────────────  only of tensors that require one

torch 2.11 and 2.12 expect a gradient for every tensor that a stage receives, and in torch 2.11 every received tensor
requires one. This module can be removed when `pyproject.toml` asks for torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage


class OlderPipelineStage(PipelineStage):
    """A stage that sends and receives gradients only of those boundary tensors that require one."""

    requires_grad_in: tuple[bool, ...] = ()
    """For each tensor that the stage receives."""
    requires_grad_out: tuple[bool, ...] = ()
    """For each tensor that the stage sends."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Messages to the neighbours, but not to this process, where a placement in a V turns: gloo cannot."""
        ops: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.peer != dist.get_rank()]

    def _received(self, chunk: int) -> list[torch.Tensor]:
        infos: tuple[Any, ...] = self.args_recv_info[chunk]
        return [info.buffer for info in infos]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        has_backward, self.has_backward = self.has_backward, False  # torch 2.11: or integers must require a gradient
        try:
            prepared = super()._prepare_forward_infra(*args, **kwargs)
        finally:
            self.has_backward = has_backward
        for chunk in self.args_recv_info:
            for buffer, requires_grad in zip(self._received(chunk), self.requires_grad_in, strict=True):
                buffer.requires_grad_(requires_grad)
        return prepared

    def _create_grad_send_info(self, args_recv_info: Any) -> Any:
        stages = super()._create_grad_send_info(args_recv_info)
        return [to if wanted else None for to, wanted in zip(stages, self.requires_grad_in, strict=True)]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the outputs of another virtual stage of this process; integers do not require a gradient."""
        outputs = prev_stage_outputs if isinstance(prev_stage_outputs, (tuple, list)) else (prev_stage_outputs,)
        infos: tuple[Any, ...] = self.args_recv_info[mb_index]
        for info, output, requires_grad in zip(infos, outputs, self.requires_grad_in, strict=True):
            info.buffer = output.detach().requires_grad_(requires_grad)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients that another virtual stage of this process has computed; 0 where it has none."""
        # strict=False: as in `get_bwd_send_ops`
        for info, gradient in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=False):
            if gradient is None and info.buffer is not None:
                gradient = torch.zeros_like(info.buffer)
            info.buffer = gradient

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_first:
            # strict=False: keyword arguments' gradients, which are None, may follow the received tensors' gradients
            pairs = zip(self._received(bwd_chunk_id), self.bwd_cache[bwd_chunk_id], strict=False)
            self.bwd_cache[bwd_chunk_id] = tuple(  # the other stage waits, also if no output depends on this input
                torch.zeros_like(received) if gradient is None and received.requires_grad else gradient
                for received, gradient in pairs
            )
        return super().get_bwd_send_ops(bwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        if not ops:
            return ops
        sent = zip(self.grad_recv_info[bwd_chunk_id], self.requires_grad_out, strict=True)
        wanted = {id(info.buffer) for info, requires_grad in sent if requires_grad}
        return [op for op in ops if id(op.tensor) in wanted]

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """No check here: `StageModule.forward` checks, and the dtype of a loss is not known beforehand."""
