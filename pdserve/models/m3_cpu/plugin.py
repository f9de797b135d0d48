"""vLLM's `general_plugins` entry point for MiniMax-M3. Knows names only: M3's code is imported when vLLM asks its registry for the class."""

ARCHITECTURES = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")
MODEL_MODULE = "pdserve.models.m3_cpu.model"


def register() -> None:
    """Point vLLM's registry at our loader for M3's architectures. Called in every process of vLLM; idempotent."""
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{MODEL_MODULE}:{architecture}")
