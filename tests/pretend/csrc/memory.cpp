// Memory of the device: who may use it, and until when.
//
// It is the host's own memory, but the host never reads it while it belongs to a tensor of the device. Fresh memory
// is full of 0xFF, which is NaN in every floating point type, so that what nobody has written is seen in a result.
//
// A tensor is freed by the host while kernels that use it are still queued. On a GPU its memory goes to the next
// tensor that is allocated on the same stream. So that is when it becomes NaN here, in that stream's order: kernels
// of the stream that were queued before have had it. Other streams' kernels have had it only if that stream waits for
// them, or if `record_stream` says that they use it.
#include "memory.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include "random.h"
#include "stream.h"

namespace pretend {

namespace {
constexpr unsigned char POISON = 0xFF;
constexpr size_t ALIGNMENT = 64, HELD_BACK_BYTES = 32 << 20, TOTAL_BYTES = size_t(4) << 30;
constexpr int MAX_DEVICES = 16;

struct Block {
  void* address;
  size_t bytes;
  int device;
  int64_t stream;
  std::mutex mutex;
  std::set<int64_t> other_streams;
};

std::atomic<int64_t> allocated[MAX_DEVICES], peak[MAX_DEVICES], late_writes{0};
std::mutex freed_mutex;
std::deque<std::pair<unsigned char*, size_t>> freed;
size_t num_freed_bytes = 0;

void* poisoned(size_t bytes) {
  void* address = nullptr;
  TORCH_CHECK(posix_memalign(&address, ALIGNMENT, bytes) == 0, "out of memory");
  return std::memset(address, POISON, bytes);
}

bool is_poisoned(const unsigned char* address, size_t bytes) {
  return bytes == 0 || (address[0] == POISON && std::memcmp(address, address + 1, bytes - 1) == 0);
}

// Poison memory, and hold it back for a while to see whether somebody still writes into it.
void retire(void* address, size_t bytes) {
  std::memset(address, POISON, bytes);
  std::lock_guard<std::mutex> lock(freed_mutex);
  freed.emplace_back(static_cast<unsigned char*>(address), bytes);
  num_freed_bytes += bytes;
  while (num_freed_bytes > HELD_BACK_BYTES) {
    auto [oldest, size] = freed.front();
    freed.pop_front();
    num_freed_bytes -= size;
    if (!is_poisoned(oldest, size)) ++late_writes;
    std::free(oldest);
  }
}

std::mutex pending_mutex;
std::map<std::pair<int, int64_t>, std::vector<std::function<void()>>> pending;  // by device and stream

void reuse_freed(Queue& queue) {
  std::vector<std::function<void()>> ready;
  {
    std::lock_guard<std::mutex> lock(pending_mutex);
    ready.swap(pending[{queue.device(), queue.number()}]);
  }
  for (auto& leave : ready) queue.push(std::move(leave));
}

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  allocated[block->device] -= block->bytes;
  // The last of the streams that use the memory retires it.
  auto left = std::make_shared<std::atomic<size_t>>(1 + block->other_streams.size());
  auto leave = [left, address = block->address, bytes = block->bytes] {
    if (--*left == 0) retire(address, bytes);
  };
  for (auto stream : block->other_streams) queue_of(block->device, stream).push(leave);
  std::lock_guard<std::mutex> lock(pending_mutex);
  pending[{block->device, block->stream}].push_back(leave);
}

void free_nothing(void*) {}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    c10::Device place(TYPE, device);
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, place};
    TORCH_CHECK(allocated[device] + bytes < TOTAL_BYTES, "pretend: out of memory of device ", device);
    reuse_freed(current_queue(device));
    auto* block = new Block{poisoned(bytes), bytes, device, current_queue(device).number(), {}, {}};
    int64_t now = allocated[device] += bytes, most = peak[device];
    while (now > most && !peak[device].compare_exchange_weak(most, now)) {
    }
    return {block->address, block, &free_block, place};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    current_queue(current_device()).push([=] { std::memcpy(to, from, bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {TOTAL_BYTES - allocated[device], TOTAL_BYTES};
  }
};

DeviceAllocator the_device_allocator;
REGISTER_ALLOCATOR(TYPE, &the_device_allocator)

// Page-locked memory: only from and to it copies run while the host goes on.

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;

void free_pinned(void* address) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(static_cast<char*>(address));
  }
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    bytes = std::max(bytes, size_t(1));
    void* address = poisoned(bytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<char*>(address)] = bytes;
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

PinnedAllocator the_pinned_allocator;
}  // namespace

c10::Allocator* device_allocator() { return &the_device_allocator; }

c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(address));
  if (after == pinned.begin()) return false;
  auto [begin, bytes] = *--after;
  return static_cast<const char*>(address) < begin + bytes;
}

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  auto* block = static_cast<Block*>(data.get_context());
  if (!block || stream.id() == block->stream) return;
  std::lock_guard<std::mutex> lock(block->mutex);
  block->other_streams.insert(stream.id());
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto fresh = the_device_allocator.allocate(bytes);
  if (size_t kept = std::min(bytes, storage.nbytes()))
    the_device_allocator.copy_data(fresh.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

int64_t allocated_bytes(int device) { return allocated[device]; }

int64_t peak_bytes(int device) { return peak[device]; }

void reset_peak(int device) { peak[device] = allocated[device].load(); }

int64_t num_late_writes() {
  std::lock_guard<std::mutex> lock(freed_mutex);
  int64_t number = late_writes;
  for (auto [address, bytes] : freed) number += !is_poisoned(address, bytes);
  return number;
}

// What PyTorch asks of the whole device.
namespace {
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(TYPE, current_device()); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();
}  // namespace

}  // namespace pretend
