// A stream: work that one thread does in order, some time after the host has queued it.
//
//   host       queue A   queue B   queue C                 the host does not wait
//   stream 0              [ A ]      [ C ]                 in the order of the queue, after a random delay
//   stream 1                    [ B ]                      in no order with stream 0, unless an event says so
//
// A marker is a point in a stream. An event is the marker that it was recorded at last; a stream that waits for an
// event has a task that waits for the marker. So a wait that the program has left out is left out here, too.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>

namespace pretend {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int STREAMS = 32;  // of a device; number 0 is the default stream

int num_devices();
int current_device();
void set_current_device(int device);
int index_of(c10::Device device);  // a device without a number is the current one

class Marker {
 public:
  void reach();
  void wait();
  bool is_reached();
  std::chrono::steady_clock::time_point when();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point when_;
};

class Queue {
 public:
  Queue(int device, int64_t number);
  void push(std::function<void()> task);
  std::shared_ptr<Marker> mark();          // the point behind all that is queued
  void wait(std::shared_ptr<Marker> mark); // what is queued from now on comes after the point
  bool is_idle();
  int device() const { return device_; }
  int64_t number() const { return number_; }

 private:
  void work();
  int device_;
  int64_t number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool started_ = false, busy_ = false;
};

Queue& queue_of(int device, int64_t stream);
Queue& current_queue(int device);
c10::Stream stream_of(const Queue& queue);
c10::Stream new_stream(int device);

// How long a task waits before it begins, in microseconds at most. Two figures, so that the default stream or all
// others can be made the late ones: a wait that is missing shows where what should have been waited for is late.
void set_delays(int default_stream_us, int other_streams_us);
// The host waits after each kernel: no order of streams can be wrong.
void set_blocking(bool blocking);
bool is_blocking();

// The host waits for the device only by these. Each is counted with the reason; `silently` is for what a real
// device does without the host.
void host_waits(Queue& queue, const char* reason);
void host_waits(const std::shared_ptr<Marker>& mark, const char* reason);
void host_waits_for_device(int device, const char* reason);
void wait_silently(const std::shared_ptr<Marker>& mark);
void on_host_wait(std::function<void(const char*)> callback);

std::string text_of(const std::exception& error);  // without the stack in C++
// A kernel that has failed makes every later call fail, as on CUDA: nothing on the device can be trusted.
void fail(const std::exception& error);
void raise_if_failed();

// Let threads end what they are at, and begin nothing more: at the end of the process.
void stop_streams();

}  // namespace pretend
