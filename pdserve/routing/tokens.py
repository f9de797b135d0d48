"""Lengths in tokens, learned from what engines report: a prompt's without a tokenizer, by its UTF-8 bytes; an answer's before it is there.

Owns the ratio and the answer length of each model. Knows nothing of requests or bodies.
"""

PRIOR_TOKENS_PER_BYTE = 0.25
"""English text under a common BPE vocabulary has about four bytes in a token; used until the first report"""
MIN_TOKENS_PER_BYTE = 1 / 64
MAX_TOKENS_PER_BYTE = 2.0
"""a template adds tokens that are in no message, so short prompts exceed one token per byte"""
LEARNING_RATE = 0.05
PRIOR_OUTPUT_TOKENS = 256
"""of one answer, used until the first one ended"""


class TokenEstimator:
    """Estimates prompt tokens per model; one instance per router."""

    def __init__(self) -> None:
        self._tokens_per_byte: dict[str, float] = {}

    def estimate_tokens(self, model: str, prompt_bytes: int) -> int:
        """Return the expected prompt length, at least 1 token."""
        return max(1, round(prompt_bytes * self.tokens_per_byte(model)))

    def tokens_per_byte(self, model: str) -> float:
        """Return the ratio in use for `model`."""
        return self._tokens_per_byte.get(model, PRIOR_TOKENS_PER_BYTE)

    def learn(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """Take one engine report into account: an exponential average, weighted as one sample whatever its length.

        Args:
            prompt_bytes: UTF-8 bytes of the prompt's text; 0 is ignored.
            prompt_tokens: `usage.prompt_tokens` of the answer.
        """
        if prompt_bytes <= 0 or prompt_tokens <= 0:
            return
        sample = min(MAX_TOKENS_PER_BYTE, max(MIN_TOKENS_PER_BYTE, prompt_tokens / prompt_bytes))
        known = self._tokens_per_byte.get(model)
        self._tokens_per_byte[model] = sample if known is None else known + LEARNING_RATE * (sample - known)


class OutputEstimator:
    """Expects a model's answers to be as long as they were: mean plus mean deviation, both exponential averages; one instance per router."""

    def __init__(self) -> None:
        self._mean_and_deviation: dict[str, tuple[float, float]] = {}

    def expected_tokens(self, model: str, max_tokens: int | None = None) -> int:
        """Return the room to keep for one answer, at least 1 token; never more than the client's own limit."""
        mean, deviation = self._mean_and_deviation.get(model, (PRIOR_OUTPUT_TOKENS, 0.0))
        expected = max(1, round(mean + deviation))
        return expected if max_tokens is None else max(1, min(expected, max_tokens))

    def learn(self, model: str, completion_tokens: int) -> None:
        """Take the length of one whole answer into account; 0 and less are ignored."""
        if completion_tokens <= 0:
            return
        known = self._mean_and_deviation.get(model)
        if known is None:
            self._mean_and_deviation[model] = (completion_tokens, completion_tokens / 2)
            return
        mean, deviation = known
        off_by = completion_tokens - mean
        self._mean_and_deviation[model] = (mean + LEARNING_RATE * off_by, deviation + LEARNING_RATE * (abs(off_by) - deviation))
