"""The MLP of a block, applied to each token separately. B batch, N tokens, D width, M hidden width."""

import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """fc2(GELU(fc1(x))): (B, N, D) → (B, N, D). Google's weights need the tanh approximation of GELU."""

    def __init__(self, width: int, hidden: int, *, tanh: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU("tanh" if tanh else "none")
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class SwiGlu(nn.Module):
    """fc2(SiLU(a)·b), where a and b are the halves of fc1(x) (Shazeer 2020): (B, N, D) → (B, N, D)."""

    def __init__(self, width: int, hidden: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fc1(x).chunk(2, dim=-1)
        return self.drop(self.fc2(self.drop(F.silu(a) * b)))
