// The device that a call is for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

// It is the current one as long as this lives, then again the caller's.
class OnDevice {
    int before_ = 0;
    int device_;

public:
    cudaError_t error;

    explicit OnDevice(int32_t device) : device_(device), error(cudaGetDevice(&before_)) {
        if (!error && device_ != before_) error = cudaSetDevice(device_);
    }
    ~OnDevice() {
        if (!error && device_ != before_) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
};
