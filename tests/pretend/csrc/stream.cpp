// Streams, events, host waits and errors.
#include <ATen/Parallel.h>
#include <Python.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/file.h>

#include <cstdlib>
#include <thread>
#include <vector>

#include "device.h"

extern "C" void omp_set_num_threads(int) __attribute__((weak));

namespace pretend {

namespace {
std::mutex error_mutex;
std::string error;
std::function<void(const char*)> wait_callback;
std::atomic<bool> has_begun{false}, contexts[64]{};  // one for each device
thread_local int device_now = 0;
thread_local std::vector<int64_t> stream_now;

int64_t& current_stream_number(int device) {
  if (stream_now.empty()) stream_now.resize(num_devices(), 0);
  return stream_now[device];
}

// A kernel computes in one thread: with more, bits would depend on how many cores the machine has. The first call
// takes PyTorch's number, which would otherwise overwrite this one later.
void compute_in_one_thread() {
  at::get_num_threads();
  if (omp_set_num_threads) omp_set_num_threads(1);
}
}  // namespace

Order order;

int num_devices() {
  static const int number = [] {
    const char* text = std::getenv("PRETEND_DEVICES");
    return text ? std::atoi(text) : 2;
  }();
  return number;
}

int current_device() { return device_now; }

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < num_devices(), "there is no device ", device, " of ", num_devices());
  device_now = device;
}

void make_context(int device) {
  static auto* made = new std::vector<std::once_flag>(num_devices());
  std::call_once(made->at(device), [device] {
    has_begun = contexts[device] = true;
    const char* folder = std::getenv("PRETEND_OWNERS");
    if (folder == nullptr) return;
    // Locked until the process ends.
    int file = open((std::string(folder) + "/" + std::to_string(device)).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    TORCH_CHECK(
        file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0, "pretend: device ", device,
        " belongs to another process: what this one computes there, and keeps, is on the wrong device");
  });
}

bool has_context(int device) { return contexts[device]; }

bool is_initialized() { return has_begun; }

int index_of(c10::Device device) { return device.has_index() ? device.index() : device_now; }

// Queues.

void Queue::push(std::function<void()> task) {
  make_context(device);
  std::call_once(started_, [this] { thread_ = std::make_unique<c10::ThreadPool>(1, -1, compute_in_one_thread); });
  ++unfinished_;
  thread_->run([this, task = std::move(task)] {
    int delay = number == 0 ? order.default_delay_us : order.other_delay_us;
    if (delay) std::this_thread::sleep_for(std::chrono::microseconds(delay / 2 + random_() % delay));
    while (order.stopped) std::this_thread::sleep_for(std::chrono::hours(1));
    try {
      task();
    } catch (const std::exception& failure) {
      fail(failure);
    }
    --unfinished_;
  });
}

std::shared_ptr<Marker> Queue::mark() {
  auto marker = std::make_shared<Marker>();
  push([marker] { marker->reach(); });
  return marker;
}

void Queue::wait(std::shared_ptr<Marker> mark) {
  push([mark] { mark->wait(); });
}

Queue& queue_of(int device, int64_t stream) {
  // Never freed: threads use them until the process has ended.
  static auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<Queue>>();
    for (int device = 0; device < num_devices(); ++device)
      for (int64_t number = 0; number < STREAMS; ++number) made->push_back(std::make_unique<Queue>(device, number));
    return made;
  }();
  return *all->at(device * STREAMS + stream);
}

Queue& current_queue(int device) { return queue_of(device, current_stream_number(device)); }

c10::Stream stream_of(const Queue& queue) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, queue.device), queue.number);
}

c10::Stream new_stream(int device) {
  static std::atomic<int> made{0};
  return stream_of(queue_of(device, 1 + made++ % (STREAMS - 2)));
}

// Host waits.

void on_host_wait(std::function<void(const char*)> callback) { wait_callback = std::move(callback); }

void wait_silently(const std::shared_ptr<Marker>& mark) {
  // The GIL, if this thread has it, is free meanwhile: the monitor must run.
  bool has_gil = Py_IsInitialized() && PyGILState_Check();
  auto* state = has_gil ? PyEval_SaveThread() : nullptr;
  mark->wait();
  if (has_gil) PyEval_RestoreThread(state);
}

void host_waits(std::shared_ptr<Marker> mark, const char* reason) {
  if (wait_callback) wait_callback(reason);
  wait_silently(mark);
  raise_if_failed();
}

void host_waits(Queue& queue, const char* reason) { host_waits(queue.mark(), reason); }

void host_waits_for_device(int device, const char* reason) {
  make_context(device);
  if (wait_callback) wait_callback(reason);
  for (int64_t number = 0; number < STREAMS; ++number) {
    auto& queue = queue_of(device, number);
    if (!queue.is_idle()) wait_silently(queue.mark());
  }
  raise_if_failed();
}

// Errors.

std::string text_of(const std::exception& error) {
  auto* own = dynamic_cast<const c10::Error*>(&error);
  return own ? own->what_without_backtrace() : error.what();
}

void fail(const std::exception& what) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (error.empty()) error = text_of(what);
}

void raise_if_failed() {
  std::lock_guard<std::mutex> lock(error_mutex);
  TORCH_CHECK(error.empty(), "pretend: the device has failed, and all work on it: ", error);
}

// What PyTorch asks of a device: the current one, its streams, and events.

namespace {
// One that was never recorded is null, and nothing to wait for, as on CUDA.
struct Event {
  std::shared_ptr<Marker> mark;
  bool is_timed;
};

const std::shared_ptr<Marker>& mark_of(void* event) { return static_cast<Event*>(event)->mark; }

Queue& queue_of(const c10::Stream& stream) { return pretend::queue_of(stream.device_index(), stream.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  c10::Device getDevice() const override { return c10::Device(TYPE, device_now); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = index_of(device); }
  void setDevice(c10::Device device) const override {
    has_begun = true;
    set_current_device(index_of(device));
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return stream_of(current_queue(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(pretend::queue_of(index_of(device), 0));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(index_of(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream_number(stream.device_index()) = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits(queue_of(stream), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_waits_for_device(device < 0 ? device_now : device, "synchronize");
  }

  // As CUDA's, these set the thread's device again at the end, which makes a context on it.
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag flag) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(), "Event of device ", device, " does not match the stream's, ",
        stream.device_index());
    make_context(device_now);
    if (!*event) *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    static_cast<Event*>(*event)->mark = queue_of(stream).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    make_context(device_now);
    queue_of(stream).wait(mark_of(event));
  }
  bool queryEvent(void* event) const override {
    raise_if_failed();
    return !event || mark_of(event)->is_reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(mark_of(event), "event.synchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (!event) return;
    delete static_cast<Event*>(event);
    try {
      make_context(device_now);
    } catch (const std::exception& error) {
      fail(error);
    }
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    for (void* event : {from, to})
      TORCH_CHECK(static_cast<Event*>(event)->is_timed, "both events must be made with enable_timing=True");
    auto &begin = mark_of(from), &end = mark_of(to);
    TORCH_CHECK(begin->is_reached() && end->is_reached(), "both events must have been reached");
    return std::chrono::duration<double, std::milli>(end->when() - begin->when()).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }
};
}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace pretend
