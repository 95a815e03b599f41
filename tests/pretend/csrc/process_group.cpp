// A backend of torch.distributed that behaves like NCCL; Gloo moves the bytes.
//
//   caller's stream     [ backward ]---.                  .---[ update ]
//   exchanges                          '--[ all-reduce ]--'
//                            started: an event ^    ^ wait(): another event; the host waits for neither
//
// As with NCCL,
// - exchanges run beside what computes, one after the other in the order of their calls, those of all groups of a
//   device: more need not fit onto a GPU;
// - `wait` lets the caller's current stream wait, and not the host;
// - an exchange's tensors are kept until `wait`, and no longer;
// - sends and receives between `_start_coalescing` and `_end_coalescing` run at the same time;
// - an exchange with a rank that is gone never ends, until `abort`; what it leaves in its tensors means nothing;
// - `abort` returns some time after the device is free again;
// - a group has one device, that of the rank's number on its host if none is named, and refuses tensors of others.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <thread>

#include "device.h"

namespace pretend {

namespace {
using at::Tensor;
using c10::intrusive_ptr;
using c10d::Backend;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
constexpr std::chrono::milliseconds ABORT_TIME(500);

// What Gloo does for one call: `start` in the stream of exchanges, and `finish` when that is done.
struct Exchange {
  std::function<intrusive_ptr<c10d::Work>()> start;
  std::function<void()> finish = [] {};
  bool is_pairwise = false;
};

class Work final : public c10d::Work {
 public:
  Work(int rank, OpType type, std::shared_ptr<Marker> end, const Queue& queue, Tensors kept, Tensors results)
      : c10d::Work(rank, type), end_(std::move(end)), device_(queue.device), kept_(std::move(kept)),
        results_(std::move(results)) {
    c10::Device device(TYPE, device_);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    // A future notes the current streams, which its callbacks' streams then wait for.
    c10::StreamGuard guard(stream_of(queue));
    future_->markCompleted(c10::IValue(results_));
  }

  bool isCompleted() override { return end_->is_reached(); }
  Tensors result() override { return results_; }
  intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void synchronize() override {
    current_queue(device_).wait(end_);
    kept_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    raise_if_failed();
    synchronize();
    if (retrieveOpType() == OpType::BARRIER) host_waits(end_, "barrier");
    return true;
  }

 private:
  std::shared_ptr<Marker> end_;
  int device_;
  Tensors kept_, results_;
  intrusive_ptr<c10::ivalue::Future> future_;
};

// Whether a group was aborted; its exchanges' tasks know no more of it.
struct State {
  Marker aborted;
  std::mutex mutex;
  intrusive_ptr<c10d::Work> awaited;

  void abort() {
    std::lock_guard<std::mutex> lock(mutex);
    if (!aborted.is_reached()) aborted.reach();
    if (awaited) awaited->abort();
  }

  // Gloo ends a wait when a connection breaks, and not when its group is aborted; NCCL's kernels ask again and again.
  // Of sends and receives Gloo knows only in `wait` whether they are done, but that can be ended.
  void wait(const intrusive_ptr<c10d::Work>& work, bool is_pairwise) {
    if (is_pairwise) {
      std::lock_guard<std::mutex> lock(mutex);
      awaited = work;
    }
    while (!is_pairwise && !aborted.is_reached() && !work->isCompleted())
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (!aborted.is_reached()) work->wait();
  }

  void run(const std::vector<Exchange>& exchanges) {
    if (aborted.is_reached()) return;
    try {
      std::vector<intrusive_ptr<c10d::Work>> works;
      for (const auto& exchange : exchanges) works.push_back(exchange.start());
      for (size_t i = 0; i < works.size(); ++i) wait(works[i], exchanges[i].is_pairwise);
      for (const auto& exchange : exchanges) exchange.finish();
    } catch (const std::exception& error) {
      if (!aborted.is_reached())
        std::fprintf(stderr, "pretend: an exchange waits for ever: %s\n", text_of(error).c_str());
      aborted.wait();
    }
  }
};

Tensors host_views(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) views.push_back(host_view(tensor));
  return views;
}

Tensors joined(Tensors first, const Tensors& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

class Group final : public Backend {
 public:
  Group(intrusive_ptr<Backend> gloo, int rank, int size, std::chrono::milliseconds timeout, c10::Device device)
      : Backend(rank, size), gloo_(std::move(gloo)), state_(std::make_shared<State>()),
        options_(c10::make_intrusive<Options>(getBackendName(), timeout)), device_(device) {}

  const std::string getBackendName() const override { return "pccl"; }
  bool supportsCoalescing() const override { return true; }
  intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void abort() override {
    intrusive_ptr<Backend>(gloo_).release();  // freed by a stream, Gloo would wait there for the rank that is gone
    state_->abort();
    std::this_thread::sleep_for(ABORT_TIME);
  }

  void startCoalescing() override { coalesces_ = true; }
  intrusive_ptr<c10d::Work> endCoalescing() override {
    coalesces_ = false;
    return launch(
        OpType::COALESCED, std::exchange(coalesced_, {}), std::exchange(coalesced_tensors_, {}), {});
  }

  intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return call(OpType::BROADCAST, tensors, tensors, by_gloo(&Backend::broadcast, host_views(tensors), options));
  }

  intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return call(OpType::ALLREDUCE, tensors, tensors, all_reduce(host_views(tensors), options.reduceOp));
  }

  intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Exchange> all;
    for (const auto& view : host_views(tensors)) all.push_back(all_reduce({view}, options.reduceOp));
    return launch(OpType::ALLREDUCE_COALESCED, std::move(all), tensors, tensors);
  }

  intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    // Ranks that are not the root end with a sum, too; NCCL leaves theirs undefined.
    return call(OpType::REDUCE, tensors, tensors, all_reduce(host_views(tensors), options.reduceOp));
  }

  intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> received{host_views(outputs.at(0))};
    auto exchange = by_gloo(&Backend::allgather, received, host_views(inputs), options);
    return call(OpType::ALLGATHER, joined(outputs[0], inputs), outputs[0], std::move(exchange));
  }

  intrusive_ptr<c10d::Work> _allgather_base(
      Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return call(OpType::_ALLGATHER_BASE, {output, input}, {output}, gather_into(output, input));
  }

  intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    std::vector<Exchange> all;
    for (size_t i = 0; i < outputs.size(); ++i) all.push_back(gather_into(outputs[i], inputs[i]));
    return launch(OpType::COALESCED, std::move(all), joined(outputs, inputs), outputs);
  }

  intrusive_ptr<c10d::Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto received = host_view(output).view(-1), sent = host_view(input).view(-1);
    // The sum is made elsewhere: the input keeps its values.
    auto sum = at::empty(sent.sizes(), sent.options());
    auto exchange = all_reduce({sum}, options.reduceOp);
    exchange.start = [sum, sent, start = exchange.start] {
      sum.copy_(sent);
      return start();
    };
    exchange.finish = [=, finish = exchange.finish, rank = rank_, size = size_] {
      finish();
      received.copy_(sum.chunk(size)[rank]);
    };
    return call(OpType::_REDUCE_SCATTER_BASE, {output, input}, {output}, std::move(exchange));
  }

  intrusive_ptr<c10d::Work> alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& received_rows, std::vector<int64_t>& sent_rows,
      const c10d::AllToAllOptions& options) override {
    auto exchange = by_gloo(
        &Backend::alltoall_base, host_view(output), host_view(input), received_rows, sent_rows, options);
    return call(OpType::ALLTOALL_BASE, {output, input}, {output}, std::move(exchange));
  }

  intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    return call(OpType::SEND, tensors, {}, by_gloo(&Backend::send, host_views(tensors), to, tag), true);
  }

  intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    return call(OpType::RECV, tensors, tensors, by_gloo(&Backend::recv, host_views(tensors), from, tag), true);
  }

  intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return launch(OpType::BARRIER, {all_reduce({at::zeros({1})}, c10d::ReduceOp::SUM)}, {}, {});
  }

 private:
  // Return the start of Gloo's own operation.
  template <typename Method, typename... Arguments>
  Exchange by_gloo(Method method, Arguments... arguments) {
    return {[=, gloo = gloo_]() mutable { return ((*gloo).*method)(arguments...); }};
  }

  Exchange gather_into(const Tensor& output, const Tensor& input) {
    std::vector<Tensors> received{host_view(output).view(-1).chunk(size_)};
    return by_gloo(&Backend::allgather, received, Tensors{host_view(input).view(-1)}, c10d::AllgatherOptions());
  }

  Exchange all_reduce(const Tensors& views, c10d::ReduceOp op) {
    // Gloo has no mean.
    bool is_mean = op == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions options;
    options.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    auto exchange = by_gloo(&Backend::allreduce, views, options);
    exchange.finish = [=, size = size_] {
      for (auto view : views)
        if (is_mean) view.div_(size);
    };
    return exchange;
  }

  intrusive_ptr<c10d::Work> call(
      OpType type, const Tensors& tensors, const Tensors& results, Exchange exchange, bool is_pairwise = false) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK(
          tensor.device() == device_, "Tensor found on device ", tensor.device(), " but the group is bound to ", device_);
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "pccl exchanges contiguous tensors");
    }
    exchange.is_pairwise = is_pairwise;
    if (!coalesces_) return launch(type, {std::move(exchange)}, tensors, results);
    coalesced_.push_back(std::move(exchange));
    coalesced_tensors_ = joined(std::move(coalesced_tensors_), tensors);
    return nullptr;
  }

  intrusive_ptr<c10d::Work> launch(
      OpType type, std::vector<Exchange> exchanges, Tensors tensors, Tensors results) {
    raise_if_failed();
    auto &queue = exchange_queue(device_.index()), &current = current_queue(device_.index());
    // A result that is read in the caller's stream before `wait` is NaN, and not what may be there already.
    Tensors read, kept;
    if (type != OpType::BROADCAST)  // whose root may read its tensor meanwhile
      for (const auto& result : results) read.push_back(host_view(result));
    for (const auto& view : read) kept.push_back(at::empty(view.sizes(), view.options()));
    current.push([read, kept] {
      for (size_t i = 0; i < read.size(); ++i) {
        kept[i].copy_(read[i]);
        poison(read[i]);
      }
    });
    queue.wait(current.mark());
    queue.push([exchanges = std::move(exchanges), state = state_, read, kept] {
      for (size_t i = 0; i < read.size(); ++i) read[i].copy_(kept[i]);
      state->run(exchanges);
    });
    auto end = queue.mark();
    if (order.blocking) wait_silently(end);
    return c10::make_intrusive<Work>(rank_, type, end, queue, std::move(tensors), std::move(results));
  }

  intrusive_ptr<Backend> gloo_;
  std::shared_ptr<State> state_;
  intrusive_ptr<Options> options_;
  c10::Device device_;
  bool coalesces_ = false;
  std::vector<Exchange> coalesced_;
  Tensors coalesced_tensors_;
};
}  // namespace

intrusive_ptr<Backend> make_group(
    intrusive_ptr<Backend> gloo, int rank, int size, std::chrono::milliseconds timeout, c10::Device device) {
  return c10::make_intrusive<Group>(std::move(gloo), rank, size, timeout, device);
}

}  // namespace pretend
