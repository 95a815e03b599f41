"""Changes that give Horovod bfloat16: models and gradients of that type, and `Compression.bf16`.

On NCCL it is NCCL's own type. On Gloo two numbers are added as floats, and the sum is rounded to the nearest, ties
to even: what PyTorch does on its own Gloo, so that the bits are the same. Over MPI Horovod refuses it by name.
"""

from __future__ import annotations

from hvd_trainer.horovod_build.source import Replacement

REASON = "Horovod knew no bfloat16: a model of that type could not even be broadcast"
KERNELS = "horovod/common/ops/cuda/cuda_kernels.cu"

NUMBER = """\
// The upper half of a float. It is computed with as a float; results are rounded to the nearest, ties to even.
struct bfloat16 {
  uint16_t bits = 0;

  bfloat16() = default;

  bfloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    bits = is_nan ? 0x7fc0u : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  }

  operator float() const {
    uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  }
};

"""
# Of no use to GPUs is the number above: there it is CUDA's own, with a product that is rounded once.
GPU_NUMBER = """\
struct Bfloat16 {
  __nv_bfloat16 value;
};

__device__ inline Bfloat16 operator*(float factor, Bfloat16 number) {
  return {__float2bfloat16_rn(factor * __bfloat162float(number.value))};
}

__device__ inline void operator*=(Bfloat16& number, float factor) {
  number = factor * number;
}

"""


def _case_before(path: str, last: str, case: str) -> Replacement:
    """A further case of a `switch`, before the one that begins with `last`."""
    return Replacement(path, last, case + last, REASON)


BFLOAT16_CHANGES = (
    Replacement(
        "horovod/common/message.h",
        "  HOROVOD_BOOL = 9,\n",
        "  HOROVOD_BOOL = 9,\n  HOROVOD_BFLOAT16 = 10,\n",
        REASON,
    ),
    _case_before(
        "horovod/common/message.cc",
        "    case HOROVOD_FLOAT32:\n      static const",
        "    case HOROVOD_BFLOAT16:\n"
        '      static const std::string bfloat16_("bfloat16");\n'
        "      return bfloat16_;\n",
    ),
    _case_before(
        "horovod/common/message.cc",
        "    case HOROVOD_FLOAT16:\n      return 2;\n",
        "    case HOROVOD_BFLOAT16:\n",
    ),
    Replacement(
        "horovod/common/half.h",
        "#include <stdint.h>\n",
        "#include <cstring>\n#include <stdint.h>\n",
        REASON,
    ),
    Replacement(
        "horovod/common/half.h",
        "inline void HalfBits2Float(",
        NUMBER + "inline void HalfBits2Float(",
        REASON,
    ),
    _case_before(
        "horovod/common/ops/collective_operations.cc",
        "  case HOROVOD_FLOAT32:\n    ScaleBufferCPUImpl(",
        "  case HOROVOD_BFLOAT16:\n"
        "    ScaleBufferCPUImpl((const bfloat16*)fused_input_data, (bfloat16*)buffer_data,\n"
        "                       num_elements, (float)scale_factor);\n"
        "    break;\n",
    ),
    _case_before(
        "horovod/common/ops/gloo_operations.cc",
        "  case HOROVOD_FLOAT32:\n",
        "  case HOROVOD_BFLOAT16:\n    return new GlooAlgorithms<bfloat16>(gloo_context);\n",
    ),
    _case_before(
        "horovod/common/ops/nccl_operations.cc",
        "  case HOROVOD_FLOAT32:\n    return ncclFloat32;\n",
        "#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 10, 3)\n"
        "  case HOROVOD_BFLOAT16:\n    return ncclBfloat16;\n"
        "#endif\n",
    ),
    Replacement(
        KERNELS,
        "#include <cuda_fp16.h>\n\nnamespace horovod {\nnamespace common {\n\n",
        "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n\nnamespace horovod {\nnamespace common {\n\n"
        + GPU_NUMBER,
        REASON,
    ),
    _case_before(
        KERNELS,
        "    case HOROVOD_FLOAT32:\n      scale_buffer_k<<<",
        "    case HOROVOD_BFLOAT16:\n"
        "      scale_buffer_k<<<blocks, threads, 0, stream>>>((const Bfloat16*) fused_input_data,\n"
        "                                                     (Bfloat16*) buffer_data, num_elements,\n"
        "                                                     (float) scale_factor);\n"
        "      break;\n",
    ),
    _case_before(
        KERNELS,
        "   case HOROVOD_FLOAT32:\n     batched_scaled_memcpy_k<",
        "   case HOROVOD_BFLOAT16:\n"
        "     batched_scaled_memcpy_k<Bfloat16, BLOCKS_PER_COPY_D2D_KERNEL><<<blocks, threads, 0, stream>>>(\n"
        "         params, (float) scale_factor);\n"
        "     break;\n",
    ),
    _case_before(
        "horovod/torch/adapter_v2.cc",
        "  case common::HOROVOD_FLOAT32:\n",
        "  case common::HOROVOD_BFLOAT16:\n    return ::torch::kBFloat16;\n",
    ),
    _case_before(
        "horovod/torch/adapter_v2.cc",
        "  case ::torch::kFloat:\n",
        "  case ::torch::kBFloat16:\n    return common::HOROVOD_BFLOAT16;\n",
    ),
    Replacement(
        "horovod/torch/mpi_ops.py",
        '_NULL = ""\n',
        '_NULL = ""\n\n'
        "# The functions are the same for all types, and told apart by name.\n"
        "for _name in [name for name in dir(mpi_lib) if 'HalfTensor' in name]:\n"
        "    setattr(mpi_lib, _name.replace('HalfTensor', 'BFloat16Tensor'), getattr(mpi_lib, _name))\n",
        REASON,
    ),
    Replacement(
        "horovod/torch/compression.py",
        "class Compression(object):\n",
        "class BF16Compressor(FP16Compressor):\n"
        '    """Compress all floating point gradients to bfloat16."""\n'
        "    @staticmethod\n"
        "    def compress(tensor):\n"
        "        wire = tensor.type(torch.bfloat16) if tensor.dtype.is_floating_point else tensor\n"
        "        return wire, tensor.dtype\n\n\n"
        "class Compression(object):\n",
        REASON,
    ),
    Replacement(
        "horovod/torch/compression.py",
        "    fp16 = FP16Compressor",
        "    fp16 = FP16Compressor\n\n    bf16 = BF16Compressor",
        REASON,
    ),
)
