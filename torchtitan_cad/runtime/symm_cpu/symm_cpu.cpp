// Symmetric memory for CPU ranks of one Linux host: an allocator for torch.distributed._symmetric_memory, and signals
// with sequence numbers. Compiled on first use, see extension.py.
//
// Memory is a file without a name (memfd) that peers open through /proc: when the last process that has mapped it ends,
// however it ends, nothing is left behind.

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <torch/library.h>

namespace {

namespace symm = c10d::symmetric_memory;
using Clock = std::chrono::steady_clock;

// Waits until ready() or the deadline: briefly by spinning, then giving the core away, since ranks may share cores.
template <typename Ready>
bool wait_until(Ready ready, int64_t timeout_ms) {
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  for (int64_t turn = 0; !ready(); ++turn) {
    if (turn < 64) {
      sched_yield();
      continue;
    }
    if (timeout_ms > 0 && Clock::now() > deadline) return ready();
    const timespec pause{0, turn < 512 ? 20000 : 100000};
    nanosleep(&pause, nullptr);
  }
  return true;
}

struct Mapping {
  Mapping(int file, size_t bytes) : size(bytes), file(file) {
    ptr = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(ptr != MAP_FAILED, "cannot map ", size, " bytes of shared memory: ", std::strerror(errno));
  }
  ~Mapping() {
    munmap(ptr, size);
    close_file();
  }
  void close_file() {
    if (file >= 0) close(file);
    file = -1;
  }
  void* ptr;
  size_t size;
  int file;
};
using Mappings = std::vector<std::shared_ptr<Mapping>>;

size_t rounded(size_t size) { return (size + 4095) / 4096 * 4096; }

class CpuSymmetricMemory : public symm::SymmetricMemory {
 public:
  CpuSymmetricMemory(Mappings mappings, size_t size, int rank) : mappings_(std::move(mappings)), size_(size), rank_(rank) {
    for (const auto& mapping : mappings_) {
      buffers_.push_back(mapping->ptr);
      pads_.push_back(static_cast<char*>(mapping->ptr) + rounded(size));
    }
  }
  std::vector<void*> get_buffer_ptrs() override { return buffers_; }
  std::vector<void*> get_signal_pad_ptrs() override { return pads_; }
  void** get_buffer_ptrs_dev() override { return buffers_.data(); }
  void** get_signal_pad_ptrs_dev() override { return pads_.data(); }
  size_t get_buffer_size() override { return size_; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return rank_; }
  int get_world_size() override { return static_cast<int>(buffers_.size()); }
  c10::Device get_device() override { return c10::Device(c10::kCPU); }
  bool world_within_direct_access() override { return true; }

  // As the CUDA backend's: a signal is one word per channel and sender that goes from 0 to 1 and back.
  void put_signal(int dst, int channel, size_t timeout_ms) override {
    exchange(pad(dst, channel, rank_), 0, 1, timeout_ms, "put_signal");
  }
  void wait_signal(int src, int channel, size_t timeout_ms) override {
    exchange(pad(rank_, channel, src), 1, 0, timeout_ms, "wait_signal");
  }
  void barrier(int channel, size_t timeout_ms) override {
    for (int peer = 0; peer < get_world_size(); ++peer) put_signal(peer, channel, timeout_ms);
    for (int peer = 0; peer < get_world_size(); ++peer) wait_signal(peer, channel, timeout_ms);
  }

 private:
  uint32_t* pad(int owner, int channel, int sender) {
    const size_t word = static_cast<size_t>(channel) * buffers_.size() + sender;
    TORCH_CHECK((word + 1) * sizeof(uint32_t) <= symm::get_signal_pad_size(), "no signal channel ", channel);
    return static_cast<uint32_t*>(pads_[owner]) + word;
  }
  static void exchange(uint32_t* word, uint32_t from, uint32_t to, size_t timeout_ms, const char* what) {
    const auto swapped = [=] {
      uint32_t expected = from;
      return __atomic_compare_exchange_n(word, &expected, to, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    };
    TORCH_CHECK(wait_until(swapped, timeout_ms), what, " timed out after ", timeout_ms, " ms");
  }

  Mappings mappings_;
  size_t size_;
  int rank_;
  std::vector<void*> buffers_, pads_;
};

// What a rank tells its peers about its memory.
struct Offer {
  pid_t pid;
  int file;
  size_t size;
  char boot_id[40];
};

std::string boot_id() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  return id;
}

std::vector<Offer> gather(c10d::Store& store, const std::string& key, int rank, int world, const Offer& mine) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&mine);
  store.set(key + "/" + std::to_string(rank), std::vector<uint8_t>(bytes, bytes + sizeof(Offer)));
  std::vector<Offer> offers(world);
  for (int peer = 0; peer < world; ++peer) {
    const auto answer = store.get(key + "/" + std::to_string(peer));
    TORCH_CHECK(answer.size() == sizeof(Offer), "unexpected answer of rank ", peer, " at rendezvous");
    std::memcpy(&offers[peer], answer.data(), sizeof(Offer));
  }
  return offers;
}

std::shared_ptr<Mapping> open_peer(const Offer& offer, int peer) {
  const auto path = "/proc/" + std::to_string(offer.pid) + "/fd/" + std::to_string(offer.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(file >= 0, "cannot open the shared memory of rank ", peer, " at ", path, ": ", std::strerror(errno));
  auto mapping = std::make_shared<Mapping>(file, offer.size);
  struct stat status{};
  TORCH_CHECK(fstat(file, &status) == 0 && static_cast<size_t>(status.st_size) == offer.size,
              "rank ", peer, " is not the process that it said it is: are the ranks in one container?");
  mapping->close_file();
  return mapping;
}

class CpuAllocator : public symm::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int, const std::optional<std::string>&) override {
    const int file = memfd_create("torchtitan_cad", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0, "cannot make shared memory: ", std::strerror(errno));
    const size_t total = rounded(size) + rounded(symm::get_signal_pad_size());
    if (ftruncate(file, static_cast<off_t>(total)) != 0) {
      close(file);
      TORCH_CHECK(false, "cannot make ", total, " bytes of shared memory: ", std::strerror(errno));
    }
    auto mapping = std::make_shared<Mapping>(file, total);
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_[mapping->ptr] = {mapping, size, nullptr};
    return mapping->ptr;
  }
  void free(void* ptr) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.erase(ptr);  // unmapped when the last handle is gone as well
  }
  size_t get_alloc_size(void* ptr) override { return block(ptr).size; }
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::kCPU; }
  std::string name() override { return "SHM"; }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(void* ptr, const std::optional<std::string>& name) override {
    TORCH_CHECK(name.has_value(), "rendezvous needs a group");
    auto& own = block(ptr);
    if (own.memory) return own.memory;
    const auto group = c10d::resolve_process_group(*name);
    const auto store = group->getStore();
    const int rank = group->getRank(), world = group->getSize();
    const auto key = "torchtitan_cad/symm_cpu/" + std::to_string(rendezvous_count_[*name]++);
    Offer mine{getpid(), own.mapping->file, own.mapping->size, {}};
    boot_id().copy(mine.boot_id, sizeof(mine.boot_id) - 1);
    const auto offers = gather(*store, key, rank, world, mine);
    Mappings mappings;
    for (int peer = 0; peer < world; ++peer) {
      TORCH_CHECK(std::strcmp(offers[peer].boot_id, mine.boot_id) == 0,
                  "rank ", peer, " of the group is on another host: CPU ranks share memory on one host only");
      TORCH_CHECK(offers[peer].size == mine.size, "rank ", peer, " allocated ", offers[peer].size, " bytes, not ", mine.size);
      mappings.push_back(peer == rank ? own.mapping : open_peer(offers[peer], peer));
    }
    gather(*store, key + "/mapped", rank, world, mine);
    own.mapping->close_file();
    own.memory = c10::make_intrusive<CpuSymmetricMemory>(mappings, own.size, rank);
    return own.memory;
  }

 private:
  struct Block {
    std::shared_ptr<Mapping> mapping;
    size_t size;
    c10::intrusive_ptr<symm::SymmetricMemory> memory;
  };
  Block& block(void* ptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(ptr);
    TORCH_CHECK(found != blocks_.end(), "not a symmetric allocation");
    return found->second;
  }
  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  std::map<std::string, int> rendezvous_count_;
};

void install() { symm::register_allocator(c10::kCPU, c10::make_intrusive<CpuAllocator>()); }

// Stores `value` in the int64 word at every address; whoever sees it also sees all that was written before.
void post(c10::IntArrayRef addresses, int64_t value) {
  for (const int64_t address : addresses) __atomic_store_n(reinterpret_cast<int64_t*>(address), value, __ATOMIC_RELEASE);
}

// Waits until the int64 word at every address is at least `value`; returns the indexes of those that are not in time.
std::vector<int64_t> wait(c10::IntArrayRef addresses, int64_t value, int64_t timeout_ms) {
  const auto arrived = [=](int64_t address) {
    return __atomic_load_n(reinterpret_cast<int64_t*>(address), __ATOMIC_ACQUIRE) >= value;
  };
  wait_until([&] { return std::all_of(addresses.begin(), addresses.end(), arrived); }, timeout_ms);
  std::vector<int64_t> missing;
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (!arrived(addresses[i])) missing.push_back(static_cast<int64_t>(i));
  }
  return missing;
}

}  // namespace

TORCH_LIBRARY(torchtitan_cad_symm_cpu, library) {
  library.def("install() -> ()", install);
  library.def("post(int[] addresses, int value) -> ()", post);
  library.def("wait(int[] addresses, int value, int timeout_ms) -> int[]", wait);
}
