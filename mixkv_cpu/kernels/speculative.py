"""EAGLE's bookkeeping with topk 1, where the draft tree is a chain.

A batch of ``bs`` requests verifies ``n`` tokens each: the last committed one and n - 1 drafts.
Names (and their spelling) follow sgl_kernel's ``speculative.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1
"""Values of SGLang's TreeMaskMode: masks over prefix and drafts, or over drafts only."""


def _write_chain_mask(tree_mask: Tensor, seq_lens: list[int], n: int, mode: int) -> None:
    """Write the causal [n, n] cells of each request; the caller writes the prefix cells."""
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    begin, flat = 0, tree_mask.view(-1)
    for seq_len in seq_lens:
        width = n + (seq_len if mode == FULL_MASK else 0)
        flat[begin : begin + n * width].view(n, width)[:, width - n :] = causal
        begin += n * width


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill in the chain of each request.

    ``retrive_*``: [bs, n], -1 on entry; ``positions``: [bs * n]; ``tree_mask``: bool, flat.
    """
    if topk != 1 or tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(
            f"sgl_kernel stand-in: topk {topk} with mask mode {int(tree_mask_mode)}; "
            "only --speculative-eagle-topk 1 with byte masks is supported"
        )
    n, bs = draft_token_num, len(verified_seq_len)
    retrive_index.copy_(torch.arange(bs * n).view(bs, n))
    retrive_next_token[:, :-1] = torch.arange(1, n)
    positions.view(bs, n).copy_(verified_seq_len[:, None] + torch.arange(n))
    _write_chain_mask(tree_mask, verified_seq_len.tolist(), n, tree_mask_mode)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept drafts as long as each equals the target's prediction after the previous token.

    In: ``candidates``, ``retrive_*`` [bs, n], ``target_predict`` bs * n. Out: ``predicts``
    [bs * n], the target's tokens after accepted ones; ``accept_index`` [bs, steps + 1], flat
    indices of accepted tokens, -1 on entry; ``accept_token_num`` [bs], accepted drafts.
    """
    if (retrive_next_sibling != -1).any():
        raise NotImplementedError("sgl_kernel stand-in: a draft tree with siblings (topk > 1)")
    wanted = target_predict.view(candidates.shape)
    steps = accept_index.shape[1] - 1
    right = (candidates[:, 1 : steps + 1] == wanted[:, :steps]).long()
    accept_token_num.copy_(right.cumprod(1).sum(1))
    accepted = torch.arange(steps + 1) <= accept_token_num[:, None]
    index = retrive_index[:, : steps + 1][accepted]
    accept_index[accepted] = index.to(accept_index.dtype)
    predicts[index.long()] = wanted[:, : steps + 1][accepted].to(predicts.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Copy each request's last accepted token; ``accept_lens`` [bs] counts the bonus token."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.view(-1)[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Copy the slots of accepted tokens to the front. Skip entries of -1 in ``accept_index``."""
    accepted = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one; its new token goes last, or to ``select_index``."""
    end = extend_start_loc + extend_seq_lens
    for first, stop in zip(extend_start_loc.tolist(), end.tolist(), strict=True):
        input_ids[first : stop - 1] = input_ids[first + 1 : stop].clone()
    last = end - 1 if select_index is None else select_index
    input_ids[last.long()] = topk_index.view(-1).to(input_ids.dtype)
