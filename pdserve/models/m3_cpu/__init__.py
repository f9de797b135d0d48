"""vLLM's own MiniMax-M3, made to run where its GPU kernels cannot, with the connector hooks that it lacks everywhere.

    plugin     what vLLM calls in each of its processes; costs nothing until an M3 model is loaded
    model      loads vLLM's module and puts the pieces below into it
    hooks      layer-wise KV transfer for sparse and index layers, on every platform
    rotary, index, attention, experts      the leaf kernels, in torch, for the CPU; moe puts the last into vLLM's MoE

vLLM keeps its model, cache specs, metadata, weight loading and layer names; only functions at the leaves are exchanged.
"""
