// What Python sees of the device.
#include <torch/csrc/utils/pybind.h>

#include "memory.h"
#include "operators.h"
#include "process_group.h"
#include "random.h"
#include "stream.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace pretend;
  module.def("device_count", &num_devices);
  module.def("current_device", &current_device);
  module.def("set_device", &set_current_device);
  module.def("synchronize", [](int device) { host_waits_for_device(device, "synchronize"); });
  module.def("generator", [](int device) { return default_generator(device); });

  module.def("memory_allocated", &allocated_bytes);
  module.def("max_memory_allocated", &peak_bytes);
  module.def("reset_peak", &reset_peak);
  module.def("late_writes", &num_late_writes);

  module.def("set_delays", &set_delays);
  module.def("set_blocking", &set_blocking);
  module.def("stop_streams", &stop_streams);
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

  module.def("make_group", &make_group);
  // For Horovod: a tensor's values when they are ready, and a result in the order of the default stream.
  module.def("read", [](const at::Tensor& tensor) {
    wait_silently(current_queue(tensor.device().index()).mark());
    return host_view(tensor).clone();
  });
  module.def("write", [](const at::Tensor& values, const at::Tensor& target) {
    queue_of(target.device().index(), 0).push([values, view = host_view(target)] { view.copy_(values); });
  });
}
