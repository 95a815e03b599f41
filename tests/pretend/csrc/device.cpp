// The device as a whole: its generators, what PyTorch asks of it, and what Python sees of it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include "device.h"

namespace pretend {

c10::intrusive_ptr<c10d::Backend> make_group(
    c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::chrono::milliseconds timeout, c10::Device device);

namespace {
// One of the host that is said to be of the device. Each kernel takes its place in the sequence when it is queued, as
// on CUDA: so reading the state waits for nothing, and the order of streams changes no numbers.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = c10::Device(TYPE, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int number = 0; number < num_devices(); ++number) made->push_back(at::make_generator<Generator>(number));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return has_context(device); }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(TYPE, current_device()); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};
}  // namespace

at::Generator for_kernel(const std::optional<at::Generator>& generator, int device) {
  const at::Generator& used = generator && generator->defined() ? *generator : default_generator(device);
  TORCH_CHECK(
      used.device() == c10::Device(TYPE, device), "a generator of ", used.device(), " for a tensor of device ", device);
  auto* own = static_cast<Generator*>(used.unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> lock(own->mutex_);
  return at::detail::createCPUGenerator(own->random64());
}

}  // namespace pretend

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace pretend;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  module.def("device_count", &num_devices);
  module.def("is_initialized", &is_initialized);
  module.def("generator", [](int device) { return default_generator(device); });
  module.def("late_writes", &num_late_writes);
  module.def("make_group", &make_group);
  module.def("run_in_order", [](int default_delay_us, int other_delay_us, bool blocking) {
    order.default_delay_us = default_delay_us;
    order.other_delay_us = other_delay_us;
    order.blocking = blocking;
  });
  module.def("stop_streams", [] { order.stopped = true; });
  // The current stream does nothing more until the marker is reached.
  py::class_<Marker, std::shared_ptr<Marker>>(module, "Marker").def("reach", &Marker::reach);
  module.def("hold", [](int device) {
    auto marker = std::make_shared<Marker>();
    current_queue(device).wait(marker);
    return marker;
  });
  module.def("on_host_wait", [](py::function callback) {
    // Never freed: threads of PyTorch call it until the process has ended.
    auto* kept = new py::function(std::move(callback));
    on_host_wait([kept](const char* reason) {
      py::gil_scoped_acquire gil;
      (*kept)(reason);
    });
  });
  // For Horovod: a tensor's values when they are ready, and a result in the order of the default stream.
  module.def("read", [](const at::Tensor& tensor) {
    wait_silently(current_queue(tensor.device().index()).mark());
    return host_view(tensor).clone();
  });
  module.def("write", [](const at::Tensor& values, const at::Tensor& target) {
    queue_of(target.device().index(), 0).push([values, view = host_view(target)] { view.copy_(values); });
  });
}
