"""Compiles experts for an H200, and prints the bytes of temporaries and of the rows."""

import os

os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import jax
import keras
from jax import numpy as jnp
from jax.experimental import topologies

from keras_moe._backends.jax import traced_for
from keras_moe.ops import grouped_mlp

H200 = """
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation" name: "NVIDIA H200"
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}
"""
R, E, D, H = 4096, 8, 512, 2048
OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def main() -> None:
    device = topologies.get_topology_desc(
        "", "cuda", topology="1x1x1", target_config=H200
    ).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)

    def spec(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(rows, sizes, hidden, output):
        outputs = grouped_mlp(
            rows, sizes, hidden, output, activation=keras.activations.gelu
        )
        return jnp.sum(jnp.square(outputs.astype("float32")))

    step = jax.jit(jax.grad(loss, (0, 2, 3)))
    specs = spec(R, D), spec(E, dtype="int32"), spec(E, D, H), spec(E, H, D)
    with traced_for("cuda"):
        lowered = step.lower(*specs)
    compiled = lowered.compile(compiler_options=OPTIONS)
    print(compiled.memory_analysis().temp_size_in_bytes, 2 * R * H)


if __name__ == "__main__":
    main()
