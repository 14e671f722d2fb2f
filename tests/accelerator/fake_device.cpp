// A device over the CPU's memory that behaves as an accelerator where it matters: it refuses operations on tensors of
// several devices, counts what would make the program wait for an accelerator, and notices where a stream uses memory
// without waiting for the stream that has written it. Every kernel is the CPU's, and has run when it was called.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

static constexpr auto KIND = c10::DeviceType::PrivateUse1;
static const c10::Device CPU(c10::kCPU);
static c10::Device device() { return {KIND, 0}; }

static std::mutex mutex;
static std::map<std::string, long> counts;
static long allocated = 0, peak = 0;
static PyObject* hook = nullptr;  // called with what is counted

static void count(const std::string& what) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    counts[what]++;
  }
  if (hook && Py_IsInitialized()) {
    py::gil_scoped_acquire gil;
    try {
      py::handle{hook}(py::str(what));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("fake device");
    }
  }
}

// ---------------------------------------------------------------------------------------------------------
// Streams: a clock counts the operations of each, and an event holds what its stream knew of all clocks
// ---------------------------------------------------------------------------------------------------------
using Clocks = std::map<c10::StreamId, long>;
static std::map<c10::StreamId, Clocks> known;  // of each stream, what it has waited for; of its own clock, the time
static Clocks known_on_host;                   // what the program has waited for
static c10::StreamId last_stream = 0;
static thread_local c10::StreamId current_stream = 0;

static void merge(Clocks& into, const Clocks& from) {
  for (auto& [stream, time] : from) into[stream] = std::max(into[stream], time);
}
static c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
static void wait_on_host() {
  std::lock_guard<std::mutex> guard(mutex);
  merge(known_on_host, known[current_stream]);
}

struct Use {
  c10::StreamId writer = 0;
  long time = 0;  // of the last write
  c10::StreamId owner = 0;  // the stream in whose order the memory is used again
  std::map<c10::StreamId, long> readers;  // since the last write
  std::set<c10::StreamId> users, recorded;
};
static std::unordered_map<const void*, Use> uses;  // by address

static void born(const void* data) {
  std::lock_guard<std::mutex> guard(mutex);
  uses[data] = {current_stream, known[current_stream][current_stream], current_stream, {}, {}, {}};
}
static void freed(const void* data) {
  bool is_in_use = false;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = uses.find(data);
    if (found == uses.end()) return;
    for (auto user : found->second.users) is_in_use |= user != found->second.owner && !found->second.recorded.count(user);
    uses.erase(found);
  }
  if (is_in_use) count("freed_in_use");
}
static void recorded(const void* data, c10::StreamId stream) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = uses.find(data);
  if (found != uses.end()) found->second.recorded.insert(stream);
}
// An operation of the current stream reads or writes this memory. It must know of the last write; a write also of the
// reads since then.
static void used(const void* data, bool writes) {
  bool is_early = false;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = uses.find(data);
    if (found == uses.end()) return;
    auto& use = found->second;
    auto& mine = known[current_stream];
    auto is_unknown = [&](c10::StreamId stream, long time) {
      return stream != current_stream && mine[stream] < time && known_on_host[stream] < time;
    };
    is_early = is_unknown(use.writer, use.time);
    use.users.insert(current_stream);
    const long now = ++mine[current_stream];
    if (writes) {
      for (auto& [reader, time] : use.readers) is_early |= is_unknown(reader, time);
      use.writer = current_stream;
      use.time = now;
      use.readers.clear();
    } else {
      use.readers[current_stream] = now;
    }
  }
  if (is_early) count("race");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard<std::mutex> guard(mutex);
    return stream_of(++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return stream_of(std::exchange(current_stream, stream.id()));
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::mutex> guard(mutex);
    if (!*event) *event = new Clocks();
    *static_cast<Clocks*>(*event) = known[stream.id()];
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> guard(mutex);
    merge(known[stream.id()], *static_cast<Clocks*>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clocks*>(event); }
  void synchronizeEvent(void* event) const override {
    std::lock_guard<std::mutex> guard(mutex);
    merge(known_on_host, *static_cast<Clocks*>(event));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> guard(mutex);
    merge(known_on_host, known[stream.id()]);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    std::lock_guard<std::mutex> guard(mutex);
    for (auto& [stream, clocks] : known) merge(known_on_host, clocks);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------------------------------------------------
// Memory
// ---------------------------------------------------------------------------------------------------------
static void account(long bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  allocated += bytes;
  peak = std::max(peak, allocated);
}
struct Block {
  void* data;
  size_t bytes;
};
static void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  freed(block->data);
  c10::free_cpu(block->data);
  account(-static_cast<long>(block->bytes));
  delete block;
}
static void never_called(void*) { TORCH_CHECK(false, "a block is freed with its context"); }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{c10::alloc_cpu(bytes), bytes};
    account(static_cast<long>(bytes));
    born(block->data);
    return {block->data, block, &free_block, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &never_called; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
static Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

// Memory of the host that an accelerator copies by itself
static std::map<const char*, size_t> pinned;  // start and bytes of each block
static void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    pinned.erase(static_cast<const char*>(data));
  }
  c10::free_cpu(data);
}
static bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(mutex);
  auto next = pinned.upper_bound(static_cast<const char*>(data));
  if (next == pinned.begin()) return false;
  auto& [start, bytes] = *std::prev(next);
  return static_cast<const char*>(data) < start + bytes;
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = static_cast<char*>(c10::alloc_cpu(std::max<size_t>(bytes, 1)));
    std::lock_guard<std::mutex> guard(mutex);
    pinned[data] = std::max<size_t>(bytes, 1);
    return {data, data, &free_pinned, CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
static PinnedAllocator pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

// ---------------------------------------------------------------------------------------------------------
// The same memory as a tensor of another device
// ---------------------------------------------------------------------------------------------------------
static void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }
static c10::Storage on_cpu(const c10::Storage& storage) {
  return {c10::Storage::use_byte_size_t(), storage.nbytes(),
          c10::DataPtr(storage.mutable_data(), new c10::Storage(storage), &drop_storage, CPU), c10::GetCPUAllocator(),
          true};
}

struct Made {  // by a kernel of the CPU: it is this device's memory from now on
  c10::Storage storage;
  long bytes;
};
static void drop_made(void* context) {
  auto* made = static_cast<Made*>(context);
  account(-made->bytes);
  freed(made->storage.data());
  delete made;
}
static c10::DataPtr owned(const c10::Storage& storage) {
  const long bytes = static_cast<long>(storage.nbytes());
  account(bytes);
  born(storage.data());
  return {storage.mutable_data(), new Made{storage, bytes}, &drop_made, device()};
}
static Tensor tensor_on(const Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}
static bool is_here(const Tensor& tensor) { return tensor.device().type() == KIND; }
static Tensor as_cpu(const Tensor& tensor) {
  return is_here(tensor) ? tensor_on(tensor, on_cpu(tensor.storage()), c10::DispatchKey::CPU) : tensor;
}

// What the CPU's kernel has made, as a tensor of the device
static Tensor moved_here(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), owned(tensor.storage()), &allocator,
                       true);
  return tensor_on(tensor, std::move(storage), c10::DispatchKey::PrivateUse1);
}

// ---------------------------------------------------------------------------------------------------------
// Every operation that is not registered below: the CPU's kernel on the same memory
// ---------------------------------------------------------------------------------------------------------
static const std::set<std::string> WAITING = {  // their results have a size that only the values tell
    "aten::nonzero", "aten::equal", "aten::_unique2", "aten::masked_select", "aten::is_nonzero", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave"};
static const std::set<std::string> TAKING_INDICES_OF_THE_CPU = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index",
    "aten::_unsafe_index_put"};

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack), name_(op.schema().name()) {}

  void run() {
    const size_t arguments = op_.schema().arguments().size();
    for (auto& result : op_.schema().returns()) is_view_ |= result.alias_info() && !result.alias_info()->isWrite();
    for (size_t i = 0; i < arguments; i++) {
      auto* alias = op_.schema().arguments()[i].alias_info();
      writes_ = alias && alias->isWrite();
      replace((*stack_)[stack_->size() - arguments + i]);
    }
    check();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    write_back();
    const size_t returns = op_.schema().returns().size();
    for (size_t i = stack_->size() - returns; i < stack_->size(); i++) restore((*stack_)[i]);
  }

 private:
  Tensor converted(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_here(tensor)) {
      has_cpu_ |= tensor.dim() > 0 && tensor.device().is_cpu();
      return tensor;
    }
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(key);
    if (found == storages_.end()) found = storages_.emplace(key, on_cpu(tensor.storage())).first;
    if (!is_view_) used(tensor.storage().data(), writes_);
    auto result = tensor_on(tensor, found->second, c10::DispatchKey::CPU);
    pairs_.emplace_back(tensor, result);
    return result;
  }

  void replace(IValue& value) {
    if (value.isTensor()) {
      value = IValue(converted(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(converted(tensor));
      value = IValue(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor.has_value() ? std::optional<Tensor>(converted(*tensor)) : std::nullopt);
      value = IValue(list);
    } else if (value.isDevice() && value.toDevice().type() == KIND) {
      value = IValue(CPU);
    }
  }

  void check() {
    if (!pairs_.empty() && has_cpu_) {
      if (TAKING_INDICES_OF_THE_CPU.count(name_)) {
        count("to_device");  // the index is copied, and the program waits for it
      } else {
        count("mismatch");
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but found cpu and ", device(), " in ", name_);
      }
    }
    bool waits = WAITING.count(name_) > 0;
    if (name_ == "aten::index")  // a mask has to be counted
      for (size_t i = 1; i < pairs_.size(); i++) waits |= pairs_[i].first.scalar_type() == at::kBool;
    if (waits) {
      wait_on_host();
      count("wait");
    }
  }

  void write_back() {  // what the kernel has resized
    for (auto& [original, copy] : storages_) {
      auto* used = copy.unsafeGetStorageImpl();
      if (used->data() != original->data()) original->set_data_ptr_noswap(owned(copy));
      if (used->nbytes() != original->nbytes()) original->set_nbytes(used->nbytes());
    }
    for (auto& [mine, theirs] : pairs_)
      if (mine.sizes() != theirs.sizes() || mine.strides() != theirs.strides() ||
          mine.storage_offset() != theirs.storage_offset())
        mine.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
  }

  Tensor returned(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu() || pairs_.empty()) return tensor;
    for (auto& [mine, theirs] : pairs_)
      if (theirs.is_same(tensor)) return mine;
    for (auto& [original, copy] : storages_)
      if (copy.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl())
        return tensor_on(tensor, c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(original)),
                         c10::DispatchKey::PrivateUse1);
    return moved_here(tensor);
  }

  void restore(IValue& value) {
    if (value.isTensor()) {
      value = IValue(returned(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(returned(tensor));
      value = IValue(list);
    }
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  const std::string name_;
  bool has_cpu_ = false;
  bool is_view_ = false;  // it touches no value
  bool writes_ = false;   // to the argument that is being replaced
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // of this device, and as the CPU's kernel sees it
};

static void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// ---------------------------------------------------------------------------------------------------------
// Operations of its own
// ---------------------------------------------------------------------------------------------------------
static Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}
static Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
static Tensor copy_from(const Tensor& source, const Tensor& target, bool is_asynchronous) {
  if (is_here(source)) used(source.storage().data(), false);
  if (is_here(target)) used(target.storage().data(), true);
  const Tensor& on_host = is_here(source) ? target : source;
  if (!is_here(on_host)) {  // memory that is not pinned, and another data type, are copied by the program
    is_asynchronous &= is_pinned(on_host.storage().data()) && source.scalar_type() == target.scalar_type();
    if (!is_asynchronous) wait_on_host();
    count(std::string(is_here(source) ? "from_device" : "to_device") + (is_asynchronous ? "_asynchronously" : ""));
  }
  as_cpu(target).copy_(as_cpu(source));
  return target;
}
static Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  TORCH_CHECK(source.sizes() == target.sizes(), "the fake device does not resize in a copy");
  return copy_from(source, target, false);
}
static at::Scalar item(const Tensor& tensor) {
  used(tensor.storage().data(), false);
  wait_on_host();
  count("item");
  return as_cpu(tensor).item();
}
static Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  std::vector<int64_t> strides(sizes.size(), 1);
  if (!stride.empty())
    for (size_t i = 0; i < strides.size(); i++) strides[i] = stride[i].guard_int(__FILE__, __LINE__);
  else
    for (int64_t i = static_cast<int64_t>(sizes.size()) - 2; i >= 0; i--)
      strides[i] = strides[i + 1] * std::max<int64_t>(sizes[i + 1], 1);
  impl->set_sizes_and_strides(sizes, strides, offset.guard_int(__FILE__, __LINE__));
  return self;
}

// Convolutions are dispatched by the device before they reach a kernel
static Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                          c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                          bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  const auto cpu_bias = bias.has_value() && bias->defined() ? std::optional<Tensor>(as_cpu(*bias)) : std::nullopt;
  return moved_here(at::convolution_symint(as_cpu(input), as_cpu(weight), cpu_bias, stride, padding, dilation,
                                           transposed, output_padding, groups));
}
static std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  const std::vector<c10::SymInt> bias_sizes{weight.sym_size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      as_cpu(gradient), as_cpu(input), as_cpu(weight), c10::SymIntArrayRef(bias_sizes), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  return {moved_here(of_input), moved_here(of_weight), moved_here(of_bias)};
}

static void record_stream(Tensor& tensor, at::Stream stream) { recorded(tensor.storage().data(), stream.id()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}

PYBIND11_MODULE(fake_device_library, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("counts", [] {
    std::lock_guard<std::mutex> guard(mutex);
    return counts;
  });
  m.def("reset", [] {
    std::lock_guard<std::mutex> guard(mutex);
    counts.clear();
  });
  m.def("allocated", [] { return allocated; });
  m.def("peak", [] { return peak; });
  m.def("reset_peak", [] { peak = allocated; });
  m.def("set_hook", [](py::object function) {
    Py_XDECREF(hook);
    hook = function.is_none() ? nullptr : function.release().ptr();
  });
  m.def("as_cpu", [](const Tensor& tensor) { return as_cpu(tensor); });
}
