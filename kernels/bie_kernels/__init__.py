# SPDX-License-Identifier: Apache-2.0
"""Kernels of the `int4_asym` KV cache.

layout      every byte offset (imports no torch)
reference   the oracle: plain torch, literal, slow
torch_path  vectorised torch for CPUs: store, seal, attention
"""
