"""A drafter's weights as the drafts on a device use them: joined where one product can do the work of several, and
with the gains of a norm in the product behind it, which then only scales its rows (RMSNorm without gains).

EAGLE-3 fuses the target's hidden states by `fc`, and its layer reads embedding and feature side by side, both normed.
EAGLE has the hidden state itself as its feature, and makes one row of embedding and feature by `fc`, which its layer
norms or not; so for EAGLE `fc` comes after the pair is made, and the head reads features as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.model_config import ModelConfig
from paceline.models.decoder import Linear
from paceline.models.drafters.eagle import Eagle
from paceline.models.drafters.eagle3 import Eagle3
from paceline.models.drafters.layers import Attention, Mlp, RMSNorm


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """Products in `dtype`, norms in float32. A norm that is None is not there."""

    config: ModelConfig  # of the one layer
    dtype: torch.dtype
    embedding: Tensor  # [vocab, hidden]: the target's own
    joins_pairs: bool  # `fc` makes one row of a pair (EAGLE), and not a feature of hidden states (EAGLE-3)
    fc: Linear
    scales_fc: bool  # `fc` reads scaled rows; EAGLE-3 only
    embedding_norm: Tensor | None  # [hidden], EAGLE-3 only, as the next one
    hidden_norm: Tensor | None
    norms_stream: bool  # the residual stream starts from the normed feature
    qkv: Linear
    scales_qkv: bool  # EAGLE only
    head_norms: Tensor | None  # [2, head dim]: of q and of k
    output: Linear
    gate_up: Linear  # reads scaled rows
    down: Linear
    head: Tensor  # [draft vocab, hidden]
    scales_head: bool  # EAGLE-3 only
    target_ids: Tensor  # [draft vocab] int32
    cos: Tensor  # [positions, head dim / 2] float32
    sin: Tensor

    @property
    def feature_size(self) -> int:
        """Numbers of the target's hidden states of one row."""
        return self.config.hidden_size if self.joins_pairs else self.fc.weight.shape[1]


def joined_weights(
    network: Eagle3 | Eagle, embedding: Tensor, dtype: torch.dtype, angles: tuple[Tensor, Tensor]
) -> DraftWeights:
    layer, is_pairwise = network.midlayer, isinstance(network, Eagle)
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(attention, Attention) and isinstance(mlp, Mlp)
    q_norm, k_norm = _norm(attention.q_norm), _norm(attention.k_norm)
    fc_norm, final_norm = (None, None) if isinstance(network, Eagle) else (_norm(network.fc_norm), _norm(network.norm))
    input_norm = _norm(layer.input_layernorm) if is_pairwise else None
    return DraftWeights(
        config=network.config.layer,
        dtype=dtype,
        embedding=embedding,
        joins_pairs=is_pairwise,
        fc=_joined([network.fc], fc_norm, dtype),
        scales_fc=fc_norm is not None,
        embedding_norm=None if is_pairwise else _norm(layer.input_layernorm),
        hidden_norm=None if isinstance(network, Eagle) else _norm(network.midlayer.hidden_norm),
        norms_stream=False if isinstance(network, Eagle) else network.midlayer.norm_before_residual,
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj], input_norm, dtype),
        scales_qkv=input_norm is not None,
        head_norms=None if q_norm is None or k_norm is None else torch.stack([q_norm, k_norm]),
        output=_joined([attention.o_proj], None, dtype),
        gate_up=_joined([mlp.gate_proj, mlp.up_proj], _known(_norm(layer.post_attention_layernorm)), dtype),
        down=_joined([mlp.down_proj], None, dtype),
        head=_joined([network.lm_head], final_norm, dtype).plain,
        scales_head=final_norm is not None,
        target_ids=network.d2t.to(network.fc.weight.device, torch.int32),
        cos=angles[0],
        sin=angles[1],
    )


def _norm(module: nn.Module) -> Tensor | None:
    return module.weight.detach().float().contiguous() if isinstance(module, RMSNorm) else None


def _known(norm: Tensor | None) -> Tensor:
    assert norm is not None
    return norm


def _joined(parts: Sequence[nn.Linear], gains: Tensor | None, dtype: torch.dtype) -> Linear:
    """`gains`: of the norm before them"""
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    weight = torch.cat([part.weight.detach() for part in parts]).float()
    weight = weight if gains is None else weight * gains
    return Linear(weight.to(dtype).contiguous(), torch.cat(biases).to(dtype) if biases else None)
