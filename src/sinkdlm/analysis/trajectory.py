"""What was seen of one denoising trajectory: reduced statistics of every forward, as arrays.

The common ground of the analysis: capture makes trajectories, metrics reads them. Numpy alone; knows no model, tokenizer or file.

N forwards ("steps"), E layers, H heads, T tokens of the row, S sinks of the model (0 without; a sink logit counts as one).
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trajectory:
    """One row on its way from masks to text, or one text under several noise levels: each forward is a step.

    Received attention of key j in a head is the mean over the row's queries of A[q, j]. A content sink by the absolute rule (Gu et
    al.) receives more than a threshold; by the relative rule (Rulli et al.) its column sum, T times what it receives, exceeds the
    mean column sum of the other tokens by a margin. Statistics that a forward did not yield are not a number.
    """

    number: int  # among the trajectories of a capture: with the seed, the key of its noise
    n_prompt: int  # fixed tokens that were given
    mask_id: int
    tokens: np.ndarray  # (N, T) int32: what each forward saw
    final: np.ndarray  # (T,) int32: the row at its end
    absolute: np.ndarray  # (N, E, H, T) bool: content sinks by the absolute rule
    relative: np.ndarray  # (N, E, H, T) bool: content sinks by the relative rule
    top: np.ndarray  # (N, E, H) int32: the content token that receives most
    top_received: np.ndarray  # (N, E, H): what it receives
    received: np.ndarray  # (N, E, T): received attention of content tokens, mean over heads
    sink_received: np.ndarray  # (N, E, H, S): received attention of the model's own sinks
    entropy: np.ndarray  # (N, E, H): of attention weights, nats, mean over queries
    value_norm: np.ndarray  # (N, E, T): eq. 15, 16
    sink_value_norm: np.ndarray  # (N, E, S)
    output_norm: np.ndarray  # (N, E, H): eq. 20, left: |o_i|, mean over queries
    bound: np.ndarray  # (N, E, H): eq. 20, right: sum_j a_ij |v_j|, mean over queries
    resting: (
        np.ndarray
    )  # (N, E, T): of each query, the share of attention on content sinks (absolute) and the model's sinks, mean over heads
    update_ratio: np.ndarray  # (N, E, T): eq. 21, 22: |z_i| / |h_i|

    @property
    def n_steps(self) -> int:
        return self.tokens.shape[0]

    @property
    def n_layers(self) -> int:
        return self.top.shape[1]

    @property
    def n_heads(self) -> int:
        return self.top.shape[2]

    @property
    def n_sinks(self) -> int:
        return self.sink_received.shape[-1]

    @property
    def sink_share(self) -> np.ndarray:
        """(N, E, H): attention on the model's own sinks."""
        return self.sink_received.sum(-1)
