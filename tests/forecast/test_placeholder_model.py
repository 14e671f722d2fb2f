"""Where a configuration is looked for: a Hub that answers, its local cache, and a Hub that cannot be reached."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import close_session, constants
from typer.testing import CliRunner

from hf_pipetransformer.cli import app
from hf_pipetransformer.forecast.placeholder_model import UnknownModelError, load_config

CONFIGURATION = json.dumps({"model_type": "bert", "num_hidden_layers": 3}).encode()


class FakeHub(BaseHTTPRequestHandler):
    """Has one model, `some-org/some-model`."""

    def do_HEAD(self) -> None:
        is_known = self.path.startswith("/some-org/some-model/resolve/") and self.path.endswith("/config.json")
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Length", str(len(CONFIGURATION) if is_known else 0))
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", '"1"')
        if not is_known:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(CONFIGURATION)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """A Hub on this machine. It is called although the tests run in offline mode."""
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as hub:
        endpoint = f"http://127.0.0.1:{hub.server_port}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        close_session()
        yield hub
    close_session()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which take no time here."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def test_a_hub_that_answers_and_its_cache(server: ThreadingHTTPServer, waits: list[float]) -> None:
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        assert load_config("some-org/some-model").num_hidden_layers == 3
        with pytest.raises(UnknownModelError, match=r"could not be loaded from .* Hub .*not a valid model identifier"):
            load_config("some-org/other-model")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert load_config("some-org/some-model").num_hidden_layers == 3, "from the local cache"
    assert waits == []


@pytest.mark.parametrize(
    ("name", "remedy"), [("some-org/other-model", "such as 'llama'"), ("brt", "similar name: bert")]
)
@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_a_hub_that_cannot_be_reached(
    command: str, name: str, remedy: str, server: ThreadingHTTPServer, waits: list[float]
) -> None:
    """There is one request, without pauses and further attempts."""
    server.server_close()
    training = ["--devices", "4", "--batch", "64", "--epochs", "2"] if command == "plan" else []
    result = CliRunner().invoke(app, [command, name, *training])
    assert (result.exit_code, result.stdout, waits) == (2, "", [])
    assert result.stderr.count("\n") == 1
    assert "and the Hugging Face Hub cannot be reached. Pass a folder, a config.json or a model type" in result.stderr
    assert remedy in result.stderr


def test_a_hub_that_never_answers(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub accepts connections and is silent, as behind some firewalls. One timeout holds for all attempts."""
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.05)
    begin = time.perf_counter()
    with pytest.raises(UnknownModelError, match="cannot be reached"):
        load_config("some-org/other-model")
    assert time.perf_counter() - begin < 5
