// Hands tensors "on GPU 0" in to the Horovod that is loaded already, past PyTorch, which would want a real GPU.

#include "horovod/common/operations.h"

#include <cstring>
#include <map>
#include <mutex>
#include <string>

using namespace horovod::common;

namespace {

std::mutex mutex;
std::map<int, std::string> answers;

struct Number : Tensor {
  float value = 1;
  const DataType dtype() const override { return HOROVOD_FLOAT32; }
  const TensorShape shape() const override { return TensorShape(std::vector<int64_t>{1}); }
  const void* data() const override { return &value; }
  int64_t size() const override { return sizeof(value); }
};

struct Context : OpContext {
  Status AllocatePersistent(int64_t, std::shared_ptr<PersistentBuffer>*) override { return Status::OK(); }
  Status AllocateOutput(TensorShape, std::shared_ptr<Tensor>*, std::shared_ptr<ReadyEvent>*) override {
    return Status::OK();
  }
  Status AllocateZeros(int64_t, DataType, std::shared_ptr<Tensor>*) override { return Status::OK(); }
  Framework framework() const override { return Framework::PYTORCH; }
};

} // namespace

extern "C" {

void hand_in(int number) {
  auto tensor = std::make_shared<Number>();
  auto answer = [number](const Status& status) {
    std::lock_guard<std::mutex> guard(mutex);
    answers[number] = status.ok() ? "ok" : status.reason();
  };
  Status status = EnqueueTensorAllreduce(std::make_shared<Context>(), tensor, tensor, ReadyEventList(),
                                         std::to_string(number), 0, answer);
  if (!status.ok()) {
    answer(status);
  }
}

// Copies the answer to a tensor; empty where there is none yet.
void answer_to(int number, char* text, std::size_t size) {
  std::lock_guard<std::mutex> guard(mutex);
  std::strncpy(text, answers[number].c_str(), size - 1);
}
}
