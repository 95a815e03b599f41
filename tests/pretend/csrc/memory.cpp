// Memory of the device: who may use it, and until when.
//
// It is the host's own memory, but the host never reads it while it belongs to a tensor of the device. Fresh memory
// is full of 0xFF, which is NaN in every floating point type, so that what nobody has written is seen in a result.
//
// A tensor is freed by the host while kernels that use it are still queued. On a GPU its memory goes to the next
// tensor that is allocated on the same stream. So that is when it becomes NaN here, in that stream's order: kernels
// of the stream that were queued before have had it. Other streams' kernels have had it only if that stream waits for
// them, or if `record_stream` says that they use it.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <string_view>

#include "device.h"

namespace pretend {

namespace {
constexpr unsigned char POISON = 0xFF;
constexpr size_t ALIGNMENT = 64, HELD_BACK_BYTES = 32 << 20, TOTAL_BYTES = size_t(4) << 30;

struct Block {
  unsigned char* address;
  size_t bytes;
  int device;
  int64_t stream;
  std::set<int64_t> other_streams;
};

std::mutex mutex;  // of all that follows
std::map<int, c10::CachingDeviceAllocator::DeviceStats> stats;
std::map<std::pair<int, int64_t>, std::vector<std::function<void()>>> freed;  // by device and stream
std::deque<std::pair<unsigned char*, size_t>> held_back;
size_t num_held_back_bytes = 0;
int64_t late_writes = 0;
std::map<const unsigned char*, size_t> pinned;

c10::CachingAllocator::Stat& allocated(int device) { return stats[device].allocated_bytes[0]; }

unsigned char* poisoned(size_t bytes) {
  void* address = nullptr;
  TORCH_CHECK(posix_memalign(&address, ALIGNMENT, bytes) == 0, "out of memory");
  return static_cast<unsigned char*>(std::memset(address, POISON, bytes));
}

bool is_poisoned(const unsigned char* address, size_t bytes) {
  return address[0] == POISON && std::memcmp(address, address + 1, bytes - 1) == 0;
}

// Poison memory, and hold it back for a while to see whether somebody still writes into it.
void retire(unsigned char* address, size_t bytes) {
  std::memset(address, POISON, bytes);
  std::lock_guard<std::mutex> lock(mutex);
  held_back.emplace_back(address, bytes);
  num_held_back_bytes += bytes;
  while (num_held_back_bytes > HELD_BACK_BYTES) {
    auto [oldest, size] = held_back.front();
    held_back.pop_front();
    num_held_back_bytes -= size;
    late_writes += !is_poisoned(oldest, size);
    std::free(oldest);
  }
}

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  // The last of the streams that use the memory retires it.
  auto left = std::make_shared<std::atomic<size_t>>(1 + block->other_streams.size());
  auto leave = [left, address = block->address, bytes = block->bytes] {
    if (--*left == 0) retire(address, bytes);
  };
  for (auto stream : block->other_streams) queue_of(block->device, stream).push(leave);
  std::lock_guard<std::mutex> lock(mutex);
  allocated(block->device).decrease(block->bytes);
  freed[{block->device, block->stream}].push_back(leave);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    make_context(device);
    auto& queue = current_queue(device);
    c10::Device place(TYPE, device);
    if (bytes == 0) return {nullptr, place};
    std::vector<std::function<void()>> reused;
    {
      std::lock_guard<std::mutex> lock(mutex);
      TORCH_CHECK(
          allocated(device).current + bytes < TOTAL_BYTES, "pretend: out of memory of device ", device);
      allocated(device).increase(bytes);
      reused.swap(freed[{device, queue.number}]);
    }
    for (auto& leave : reused) queue.push(std::move(leave));
    auto* block = new Block{poisoned(bytes), bytes, device, queue.number, {}};
    return {block->address, block, &free_block, place};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    current_queue(current_device()).push([=] { std::memcpy(to, from, bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    allocated(device).reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {TOTAL_BYTES - getDeviceStats(device).allocated_bytes[0].current, TOTAL_BYTES};
  }
};

DeviceAllocator the_device_allocator;
REGISTER_ALLOCATOR(TYPE, &the_device_allocator)

// Page-locked memory: only from and to it copies run while the host goes on.

void free_pinned(void* address) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(static_cast<unsigned char*>(address));
  }
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* address = poisoned(std::max(bytes, size_t(1)));
    std::lock_guard<std::mutex> lock(mutex);
    pinned[address] = std::max(bytes, size_t(1));
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
  std::lock_guard<std::mutex> lock(mutex);
  auto* asked = static_cast<const unsigned char*>(address);
  auto after = pinned.upper_bound(asked);
  if (after == pinned.begin()) return false;
  auto [begin, bytes] = *--after;
  return asked < begin + bytes;
}

uint64_t digest_of(const at::Tensor& tensor) {
  if (!tensor.is_contiguous()) return 0;
  std::string_view bytes(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  return std::hash<std::string_view>()(bytes);
}

void poison(const at::Tensor& tensor) {
  if (tensor.numel() && tensor.is_contiguous()) std::memset(tensor.mutable_data_ptr(), POISON, tensor.nbytes());
}

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  auto* block = static_cast<Block*>(data.get_context());
  std::lock_guard<std::mutex> lock(mutex);
  if (block && stream.id() != block->stream) block->other_streams.insert(stream.id());
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto fresh = the_device_allocator.allocate(bytes);
  if (size_t kept = std::min(bytes, storage.nbytes()))
    the_device_allocator.copy_data(fresh.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

int64_t num_late_writes() {
  std::lock_guard<std::mutex> lock(mutex);
  int64_t number = late_writes;
  for (auto [address, bytes] : held_back) number += !is_poisoned(address, bytes);
  return number;
}

}  // namespace pretend
