// Memory of the device and page-locked memory of the host.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

namespace pretend {

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
void record_stream(const c10::DataPtr& data, c10::Stream stream);
void resize_storage(const c10::Storage& storage, size_t bytes);

int64_t allocated_bytes(int device);
int64_t peak_bytes(int device);
void reset_peak(int device);
int64_t num_late_writes();  // into memory that had been freed; those of memory that is still held back

}  // namespace pretend
