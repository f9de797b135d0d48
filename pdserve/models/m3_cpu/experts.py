"""M3's experts: each token goes through a few of many small MLPs, and their outputs are weighted and summed.

    act(gate, up) = gate' × sigmoid(alpha × gate') × (up' + beta)    gate' = min(gate, limit), up' = clamp(up, ±limit)

With alpha 1.702, beta 1, limit 7: act(1, 1) = 1 × 0.8458 × 2 = 1.6916.
"""

import torch


def run_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    alpha: float,
    beta: float,
    limit: float,
) -> torch.Tensor:
    """Sum each token's chosen experts.

    Args:
        x: [num_tokens, hidden].
        w13: [num_experts, 2 × intermediate, hidden], gates then ups.
        w2: [num_experts, hidden, intermediate].
        weights: [num_tokens, topk] float32.
        experts: [num_tokens, topk] int32, numbers in [0, num_experts).
        alpha: slope of the sigmoid.
        beta: added to the up half.
        limit: clamp of both halves.

    Returns:
        [num_tokens, hidden] in x's dtype.
    """
    output = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        token, choice = (experts == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ w13[expert].T).chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = gate * torch.sigmoid(alpha * gate) * (up + beta)
        output.index_add_(0, token, (hidden @ w2[expert].T) * weights[token, choice, None].to(x.dtype))
    return output
