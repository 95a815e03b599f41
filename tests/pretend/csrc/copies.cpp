// Copies between host and device, within a device, and from one to another; and the reading of one number.
#include <ATen/ops/_local_scalar_dense.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "memory.h"
#include "operators.h"
#include "stream.h"

namespace pretend {

namespace {
using at::Tensor;

constexpr size_t STAGED_BYTES = 65536;  // CUDA's driver takes so much of pageable memory along with the command

std::function<void()> copy_task(const Tensor& from, const Tensor& to) {
  return [from, to] {
    at::NoGradGuard no_grad;
    to.copy_(from);
  };
}

// Both devices' streams take part: what they do before and after comes before and after the copy.
void copy_to_other_device(const Tensor& from, const Tensor& to) {
  auto &source = current_queue(from.device().index()), &target = current_queue(to.device().index());
  target.wait(source.mark());
  target.push(copy_task(host_view(from), host_view(to)));
  source.wait(target.mark());
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  raise_if_failed();
  if (from.numel() == 0) return to;
  if (is_on_device(from) && is_on_device(to) && from.device() != to.device()) {
    copy_to_other_device(from, to);
    return to;
  }
  auto& queue = current_queue((is_on_device(to) ? to : from).device().index());
  if (is_on_device(from) && is_on_device(to)) {
    queue.push(copy_task(host_view(from), host_view(to)));
    return to;
  }
  bool to_device = is_on_device(to);
  const Tensor& on_host = to_device ? from : to;
  if (non_blocking && is_pinned(on_host.const_data_ptr())) {
    // The task keeps the host's tensor: PyTorch reuses page-locked memory only after copies from and to it.
    queue.push(to_device ? copy_task(from, host_view(to)) : copy_task(host_view(from), to));
    return to;
  }
  if (non_blocking && to_device && from.nbytes() <= STAGED_BYTES) {
    queue.push(copy_task(from.clone(), host_view(to)));
    return to;
  }
  queue.push(to_device ? copy_task(from, host_view(to)) : copy_task(host_view(from), to));
  host_waits(queue, to_device ? "copy to the device" : "copy to the host");
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) {
  host_waits(current_queue(tensor.device().index()), "item");
  return at::_local_scalar_dense(host_view(tensor));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
}
}  // namespace

}  // namespace pretend
