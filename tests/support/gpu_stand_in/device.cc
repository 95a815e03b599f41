// A GPU and an NCCL that do nothing but take orders: what the next exchange's kernel does, and what was asked of it.
// Preloaded, so that Horovod calls these functions instead of the libraries'.

#include <atomic>
#include <chrono>
#include <thread>

enum { SUCCESS = 0, NOT_READY = 600, ASSERT = 710 };
enum Kernel { ENDS = 0, WAITS_FOR_ANOTHER_RANK = 1, FAILS = 2 };

static std::atomic<int> kernel{ENDS}, exchanges{0}, questions_too_late{0};
static std::atomic<bool> aborted{false};
static char object;

static int state_of_kernel() {
  if (kernel == FAILS) {
    return ASSERT;
  }
  return kernel == WAITS_FOR_ANOTHER_RANK && !aborted ? NOT_READY : SUCCESS;
}

extern "C" {

void let_kernels(int what) { kernel = what; }
int count_exchanges() { return exchanges; }
int count_questions_too_late() { return questions_too_late; }

int cudaGetDevice(int* device) { return *device = 0; }
int cudaSetDevice(int) { return SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int*, int* greatest) { return *greatest = 0; }
int cudaStreamCreateWithPriority(void** stream, unsigned, int) {
  *stream = &object;
  return SUCCESS;
}
int cudaEventCreateWithFlags(void** event, unsigned) {
  *event = &object;
  return SUCCESS;
}
int cudaEventRecord(void*, void*) { return SUCCESS; }
int cudaEventQuery(void*) { return state_of_kernel(); }
int cudaEventSynchronize(void*) {
  while (state_of_kernel() == NOT_READY) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return state_of_kernel();
}
const char* cudaGetErrorString(int error) {
  return error == ASSERT ? "device-side assert triggered" : "another error";
}

struct UniqueId {
  char bytes[128];
};
int ncclGetUniqueId(UniqueId*) { return SUCCESS; }
int ncclCommInitRank(void** communicator, int, UniqueId, int) {
  *communicator = &object;
  return SUCCESS;
}
int ncclAllReduce(const void*, void*, unsigned long, int, int, void*, void*) {
  ++exchanges;
  return SUCCESS;
}
int ncclCommGetAsyncError(void*, int* error) {
  questions_too_late += aborted;
  return *error = SUCCESS;
}
int ncclCommAbort(void*) {
  aborted = true;
  return SUCCESS;
}
int ncclCommDestroy(void*) { return SUCCESS; }
}
