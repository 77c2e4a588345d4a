// A device without hardware for torch, "ledger" (PrivateUse1), on which mistakes with streams fail on any machine.
//
// Memory is the host's and operators run at once. Streams and events only keep vector clocks: of every stream the number
// of its last operator that is known to be done. An operator that uses memory although the clocks do not say that earlier
// uses of it on other streams are over is a race, whatever order things happened to run in. That holds for reuse as
// well: an allocation is assumed to be made of anything that was freed on its stream before, as a caching allocator may.
//
// Host knowledge is kept per device: ranks that are threads each drive one.

#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr auto LEDGER = c10::DeviceType::PrivateUse1;
constexpr int NUM_DEVICES = 4;
constexpr int64_t STREAMS_PER_DEVICE = int64_t{1} << 20;

// Streams -----------------------------------------------------------------------------------------------------------

using Key = int64_t;  // of a stream: device * STREAMS_PER_DEVICE + its id there
using Clock = std::map<Key, int64_t>;

struct Event {
  int64_t id;
  Clock clock;
};

std::recursive_mutex mutex;
std::map<Key, Clock> clocks;
Clock host[NUM_DEVICES];
std::vector<std::string> history;
std::vector<std::string> races;
int64_t num_streams = 0, num_events = 0;

thread_local int device = 0;
thread_local int64_t current[NUM_DEVICES] = {};
thread_local bool in_fallback = false;

Key key(int on, int64_t id) { return on * STREAMS_PER_DEVICE + id; }
Key key(const c10::Stream& stream) { return key(stream.device_index(), stream.id()); }
Key current_key() { return key(device, current[device]); }

std::string name(Key stream) {
  auto label = "stream " + std::to_string(stream % STREAMS_PER_DEVICE);
  auto on = stream / STREAMS_PER_DEVICE;
  return on ? label + " of ledger:" + std::to_string(on) : label;
}

void merge(Clock& into, const Clock& from) {
  for (auto& [stream, count] : from) into[stream] = std::max(into[stream], count);
}

bool knows(const Clock& clock, Key stream, int64_t count) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= count;
}

void race(const std::string& what) {
  if (std::find(races.begin(), races.end(), what) == races.end()) races.push_back(what);
}

// What the operator that the current stream runs next comes after.
Clock known() {
  Clock clock = clocks[current_key()];
  merge(clock, host[device]);
  return clock;
}

void advance(const std::string& operation) {
  auto stream = current_key();
  clocks[stream] = known();
  clocks[stream][stream]++;
  history.push_back(operation + " on " + std::to_string(stream % STREAMS_PER_DEVICE));
}

// Memory ------------------------------------------------------------------------------------------------------------

struct Use {
  size_t begin, end;
  bool writes;
  Key stream;
  int64_t count;
  std::string operation;
};

struct Past {  // last uses of what was freed on a stream, by the streams that used it
  std::map<Key, std::pair<int64_t, std::string>> last;
};

struct Block {
  size_t num_bytes;
  Key stream;
  std::vector<Use> uses;
  Past before;
  std::set<Key> recorded;
};

std::map<char*, Block> blocks;
std::map<Key, Past> freed;

Block* find(const void* address, size_t* offset = nullptr) {
  auto at = blocks.upper_bound((char*)address);
  if (at == blocks.begin()) return nullptr;
  --at;
  size_t distance = (char*)address - at->first;
  if (distance >= at->second.num_bytes) return nullptr;
  if (offset) *offset = distance;
  return &at->second;
}

void* allocate(size_t num_bytes) {
  void* address = nullptr;
  if (posix_memalign(&address, 64, num_bytes)) throw std::bad_alloc();
  std::lock_guard lock(mutex);
  auto stream = current_key();
  blocks[(char*)address] = Block{num_bytes, stream, {}, freed[stream], {}};
  return address;
}

void release(void* address) {
  if (!address) return;
  {
    std::lock_guard lock(mutex);
    auto block = blocks.find((char*)address);
    auto& past = freed[block->second.stream].last;
    for (auto& use : block->second.uses) {
      if (block->second.recorded.count(use.stream)) continue;
      auto& last = past[use.stream];
      last = std::max(last, {use.count, use.operation});
    }
    blocks.erase(block);
  }
  free(address);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* address = num_bytes ? ::allocate(num_bytes) : nullptr;
    return {address, address, &release, c10::Device(LEDGER, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { memcpy(to, from, num_bytes); }
} allocator;
REGISTER_ALLOCATOR(LEDGER, &allocator);

bool on_ledger(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == LEDGER; }

char* address(const at::Tensor& tensor) {
  auto* first = (char*)tensor.storage().unsafeGetStorageImpl()->mutable_data();
  return first ? first + tensor.storage_offset() * tensor.itemsize() : nullptr;
}

// The operator that the current stream runs next reads or writes a tensor: its memory from the first element to the last.
void touch(const at::Tensor& tensor, bool writes, const std::string& operation) {
  size_t begin;
  if (!on_ledger(tensor) || !tensor.numel()) return;
  Block* block = find(address(tensor), &begin);
  if (!block) return;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  size_t end = begin + (last + 1) * tensor.itemsize();

  auto stream = current_key();
  Clock before = known();
  auto mine = operation + " on " + name(stream);
  for (auto& [other, use] : block->before.last)
    if (other != stream && !knows(before, other, use.first))
      race(mine + " uses memory that was freed while " + use.second + " on " + name(other) + " may use it");
  for (auto& use : block->uses) {
    if (use.stream == stream || use.end <= begin || end <= use.begin || knows(before, use.stream, use.count)) continue;
    auto theirs = use.operation + " on " + name(use.stream);
    if (use.writes) race(mine + (writes ? " overwrites" : " reads") + " what " + theirs + " writes");
    else if (writes) race(mine + " overwrites what " + theirs + " reads");
  }
  std::erase_if(block->uses, [&](const Use& use) {
    return begin <= use.begin && use.end <= end && (writes || (use.stream == stream && !use.writes));
  });
  block->uses.push_back({begin, end, writes, stream, before[stream] + 1, operation});
}

// What of this memory is freed is not used again before the work that is on the stream by then is done.
void record(const void* address, const c10::Stream& stream) {
  std::lock_guard lock(mutex);
  if (Block* block = find(address)) block->recorded.insert(key(stream));
}

// The device --------------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return LEDGER; }
  c10::Device getDevice() const override { return {LEDGER, (c10::DeviceIndex)device}; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto from = getDevice();
    device = to.index();
    return from;
  }
  void setDevice(c10::Device to) const override { device = to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { device = to.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }

  static c10::Stream stream(c10::Device on, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, on, id);
  }
  static c10::Device indexed(c10::Device on) { return on.has_index() ? on : c10::Device(LEDGER, device); }
  c10::Stream getStream(c10::Device on) const override {
    on = indexed(on);
    return stream(on, current[on.index()]);
  }
  c10::Stream getDefaultStream(c10::Device on) const override { return stream(indexed(on), 0); }
  c10::Stream getNewStream(c10::Device on, int) const override {
    std::lock_guard lock(mutex);
    return stream(indexed(on), ++num_streams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device on, bool) const override { return getNewStream(on, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto from = getStream(to.device());
    current[to.device_index()] = to.id();
    return from;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return (void*)key(stream); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    std::lock_guard lock(mutex);
    merge(host[device], clocks[key(stream)]);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    std::lock_guard lock(mutex);
    for (auto& [stream, clock] : clocks) merge(host[device], clock);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard lock(mutex);
    if (!*event) *event = new Event{++num_events, {}};
    auto& recorded = *(Event*)*event;
    recorded.clock = clocks[key(stream)];
    merge(recorded.clock, host[stream.device_index()]);
    history.push_back("record e" + std::to_string(recorded.id) + " on " + std::to_string(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard lock(mutex);
    if (event) merge(clocks[key(stream)], ((Event*)event)->clock);
    auto which = event ? "e" + std::to_string(((Event*)event)->id) : std::string("nothing");
    history.push_back("wait " + which + " on " + std::to_string(stream.id()));
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    std::lock_guard lock(mutex);
    if (event) merge(host[device], ((Event*)event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    ::record(data.get(), stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return device; }
  void setCurrentDevice(c10::DeviceIndex to) const override { device = to; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override { return std::exchange(device, to); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override { return exchangeDevice(to); }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto grown = allocator.allocate(num_bytes);
    if (impl->data() && num_bytes) memcpy(grown.get(), impl->data(), std::min(num_bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(num_bytes);
  }
} hooks;

// Operators ---------------------------------------------------------------------------------------------------------

// The same memory as a CPU tensor.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!on_ledger(tensor)) return tensor;
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  return at::from_blob(address(tensor), tensor.sizes(), tensor.strides(), options);
}

// Any operator, on copies of its tensors.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto operation = schema.name().substr(schema.name().find("::") + 2);
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  {
    std::lock_guard lock(mutex);
    for (bool writes : {false, true}) {
      for (size_t i = 0; i < schema.arguments().size(); i++) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (writes && !(alias && alias->isWrite())) continue;
        if (arguments[i].isTensor()) touch(arguments[i].toTensor(), writes, operation);
        if (!arguments[i].isList()) continue;
        for (const auto& item : arguments[i].toListRef())
          if (item.isTensor()) touch(item.toTensor(), writes, operation);
      }
    }
  }
  bool outer = std::exchange(in_fallback, true);
  at::native::cpu_fallback(op, stack);
  in_fallback = outer;
  std::lock_guard lock(mutex);
  for (const auto& result : torch::jit::last(*stack, schema.returns().size())) {
    if (!result.isTensor() || !on_ledger(result.toTensor()) || !result.toTensor().numel()) continue;
    Block* block = find(address(result.toTensor()));
    if (block && block->uses.empty()) touch(result.toTensor(), true, operation);
  }
  if (!outer) advance(operation);
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> on,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Guard::indexed(on.value_or(c10::Device(LEDGER))));
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> on,
    std::optional<bool>) {
  c10::DeviceGuard guard(Guard::indexed(on.value_or(c10::Device(LEDGER))));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!in_fallback) {
    std::lock_guard lock(mutex);
    touch(from, false, "copy");
    touch(to, true, "copy");
    advance("copy");
    if (!non_blocking && on_ledger(from) != on_ledger(to)) merge(host[device], clocks[current_key()]);
  }
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  on_host(to).copy_(on_host(from));
  return to;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  ::record(address(tensor), stream);
}

at::Scalar item(const at::Tensor& tensor) {
  std::lock_guard lock(mutex);
  touch(tensor, false, "item");
  advance("item");
  merge(host[device], clocks[current_key()]);
  return at::_local_scalar_dense(on_host(tensor));
}

at::Tensor as_strided(
    const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto first = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::cpu::as_strided(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), first);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(tensor, size, stride, tensor.storage_offset());
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), std::nullopt);
}

at::Tensor& set_part(
    at::Tensor& tensor, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return tensor;
}

at::Tensor& set_all(at::Tensor& tensor, at::Storage source) {
  std::vector<c10::SymInt> size{int64_t(source.nbytes() / tensor.itemsize())}, stride{1};
  return set_part(tensor, source, 0, size, stride);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_all);
  m.impl("set_.source_Storage_storage_offset", &set_part);
}

TORCH_LIBRARY(ledger, m) {
  m.def("install() -> ()", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("reset() -> ()", [] {  // as if nothing had run
    std::lock_guard lock(mutex);
    races.clear();
    history.clear();
    freed.clear();
    for (auto& [first, block] : blocks) block.uses.clear(), block.before.last.clear();
  });
  m.def("races() -> str[]", [] { return races; });
  m.def("history() -> str[]", [] { return history; });
  m.def("on_host(Tensor tensor) -> Tensor", [](const at::Tensor& tensor) { return on_host(tensor); });
  m.def("use(Tensor[] reads, Tensor[] writes, str operation) -> ()",
        [](at::TensorList reads, at::TensorList writes, std::string operation) {
          std::lock_guard lock(mutex);
          for (const auto& tensor : reads) touch(tensor, false, operation);
          for (const auto& tensor : writes) touch(tensor, true, operation);
          advance(operation);
        });
}

}  // namespace
