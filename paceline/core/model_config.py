"""What a decoder needs to know about a model, whatever file it came from."""

from dataclasses import dataclass

ARCHITECTURES = {
    # Hugging Face architecture -> our family
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary scaling, in Hugging Face's terms. `kind` is default, linear, llama3, yarn or longrope."""

    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn: context the model was first trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn (DeepSeek style)
    mscale_all_dim: float | None = None  # yarn (DeepSeek style)
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    factors: tuple[float, ...] = ()  # longrope: by how much each pair is slowed within the original context


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: RMSNorm on each head of q and k, before RoPE
    sliding_window: int | None = None  # keys further back than this are not attended to
    sliding_layers: tuple[int, ...] | None = None  # layers with the window; None with a window: all
    activation: str = "silu"  # or gelu_tanh (Gemma)
    output_norms: bool = False  # Gemma: also a norm on what attention and MLP give back
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden_size)
    attention_scale: float | None = None  # None: head_dim ** -0.5
    local_rope_theta: float | None = None  # Gemma: layers with a window have a rotary base of their own, unscaled
    no_rope_layers: tuple[int, ...] = ()  # SmolLM3: layers that see no positions
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        """The factor on a query's product with a key."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def special_parts(self) -> frozenset[str]:
        """What this model has beyond a Llama layer: kernels that compute a whole layer must know each of them."""
        parts = {
            "GeGLU": self.activation != "silu",
            "norms after attention and MLP": self.output_norms,
            "scaled embeddings": self.embedding_scale != 1.0,
            "its own attention scale": self.attention_scale is not None,
            "two rotary bases": self.local_rope_theta is not None,
            "layers without rotary embedding": bool(self.no_rope_layers),
        }
        return frozenset(name for name, present in parts.items() if present)

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, or None where it sees everything."""
        if self.sliding_window is None:
            return None
        windowed = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if windowed else None
