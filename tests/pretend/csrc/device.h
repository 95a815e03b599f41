// What the files of the device share.
//
// A stream is work that one thread does in order, some time after the host has queued it.
//
//   host       queue A   queue B   queue C                 the host does not wait
//   stream 0              [ A ]      [ C ]                 in the order of the queue, after a random delay
//   stream 1                    [ B ]                      in no order with stream 0, unless an event says so
//
// A marker is a point in a stream. An event is the marker that it was recorded at last; a stream that waits for an
// event has a task that waits for the marker. So a wait that the program has left out is left out here, too.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/core/thread_pool.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>

namespace pretend {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int STREAMS = 32;  // of a device; number 0 is the default stream, and the last one that of exchanges

int num_devices();
int current_device();
// The first work on a device makes a context there. As on a GPU in exclusive mode, one process only may have one: two
// ranks of a job on one device would be a mistake. Whether it has any, or has chosen a device, tells `is_initialized`.
void make_context(int device);
bool has_context(int device);
bool is_initialized();
void set_current_device(int device);
int index_of(c10::Device device);  // a device without a number is the current one

// Streams.

class Marker {
 public:
  void reach() { reached_.set_value(std::chrono::steady_clock::now()); }
  void wait() { when_.wait(); }
  bool is_reached() { return when_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  std::chrono::steady_clock::time_point when() { return when_.get(); }

 private:
  std::promise<std::chrono::steady_clock::time_point> reached_;
  std::shared_future<std::chrono::steady_clock::time_point> when_ = reached_.get_future().share();
};

class Queue {
 public:
  Queue(int device, int64_t number) : device(device), number(number), random_(device * STREAMS + number) {}
  void push(std::function<void()> task);
  std::shared_ptr<Marker> mark();           // the point behind all that is queued
  void wait(std::shared_ptr<Marker> mark);  // what is queued from now on comes after the point
  bool is_idle() const { return unfinished_ == 0; }
  const int device;
  const int64_t number;

 private:
  std::once_flag started_;
  std::unique_ptr<c10::ThreadPool> thread_;
  std::atomic<int64_t> unfinished_{0};
  std::mt19937 random_;
};

Queue& queue_of(int device, int64_t stream);
Queue& current_queue(int device);
inline Queue& exchange_queue(int device) { return queue_of(device, STREAMS - 1); }
c10::Stream stream_of(const Queue& queue);
c10::Stream new_stream(int device);

// How long a task waits before it begins, in microseconds. Two figures, so that the default stream or all others can
// be made the late ones: a wait that is missing shows where what should have been waited for is late. If blocking,
// the host waits after each kernel: no order of streams can be wrong.
struct Order {
  std::atomic<int> default_delay_us{0}, other_delay_us{0};
  std::atomic<bool> blocking{false};
  std::atomic<bool> stopped{false};  // threads begin nothing more: at the end of the process
};
extern Order order;

// The host waits for the device only by these. Each is counted with the reason; `silently` is for what a real
// device does without the host.
void host_waits(std::shared_ptr<Marker> mark, const char* reason);
void host_waits(Queue& queue, const char* reason);
void host_waits_for_device(int device, const char* reason);
void wait_silently(const std::shared_ptr<Marker>& mark);
void on_host_wait(std::function<void(const char*)> callback);

std::string text_of(const std::exception& error);  // without the stack in C++
// A kernel that has failed makes every later call fail, as on CUDA: nothing on the device can be trusted.
void fail(const std::exception& error);
void raise_if_failed();

// Memory of the device, and page-locked memory of the host.

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
uint64_t digest_of(const at::Tensor& tensor);
void poison(const at::Tensor& tensor);  // so that what is read too early is NaN, and no value that was there
void record_stream(const c10::DataPtr& data, c10::Stream stream);
void resize_storage(const c10::Storage& storage, size_t bytes);
int64_t num_late_writes();  // into memory that had been freed; those of memory that is still held back

// Tensors.

bool is_on_device(const at::Tensor& tensor);
// A tensor of the host in the same memory, for a kernel that runs in a stream. It keeps nothing alive.
at::Tensor host_view(const at::Tensor& tensor);
// A generator for one kernel: its numbers depend on how many kernels have drawn before, not on when they run.
at::Generator for_kernel(const std::optional<at::Generator>& generator, int device);

}  // namespace pretend
