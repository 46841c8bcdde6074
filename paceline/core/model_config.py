"""What a decoder needs to know about a model, whatever file it came from."""

from dataclasses import dataclass

ARCHITECTURES = {
    # Hugging Face architecture -> our family
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary scaling, in Hugging Face's terms. `kind` is default, linear, llama3 or yarn."""

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
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, or None where it sees everything."""
        if self.sliding_window is None:
            return None
        windowed = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if windowed else None
