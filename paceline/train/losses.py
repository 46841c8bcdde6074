"""Soft cross-entropy and total variation over a vocabulary, without ever holding all logits.

For 16k rows and a vocabulary of 50k, logits in float32 are 3 GB, and autograd would keep several copies. Here rows go
through in chunks, and the gradient is worked out in the same sweep: with p the teacher's and q the student's softmax,

    cross-entropy     -sum_v p_v log q_v         d / d logits = q - p
    total variation   1/2 sum_v |p_v - q_v|      d / d logits = 1/2 q * (s - sum_v s_v q_v), s = sign(q - p)

so only the gradients with respect to the student's hidden states (and its head, if that is trained) are kept.
Cross-entropy looks for a q that is nowhere far too low; what verification accepts is 1 - total variation.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**28  # logits per chunk: 1 GiB in float32


def soft_cross_entropy(
    student: Tensor,  # [rows, hidden]: what the student's head multiplies
    student_head: Tensor,  # [vocab, hidden]
    teacher: Tensor,  # [rows, teacher hidden]
    teacher_head: Tensor,  # [vocab, teacher hidden]: the same vocabulary
    weights: Tensor,  # [rows]
    variation_weight: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The weighted sum over rows of cross-entropy + variation_weight * total variation, and [rows] bool: the student's
    first choice is the teacher's."""
    loss, agrees = _SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        student, student_head, teacher, teacher_head, weights, variation_weight
    )
    return loss, agrees


def chunk_rows(vocab: int) -> int:
    return max(1, CHUNK_ELEMENTS // vocab)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        student_head: Tensor,
        teacher: Tensor,
        teacher_head: Tensor,
        weights: Tensor,
        variation_weight: float,
    ) -> tuple[Tensor, Tensor]:
        dtype = student.dtype
        head, guide = student_head.to(dtype), teacher_head.to(teacher.dtype)
        trains_head = student_head.requires_grad
        grad_student = torch.empty_like(student)
        grad_head = torch.zeros_like(student_head, dtype=torch.float32) if trains_head else None
        loss = torch.zeros((), dtype=torch.float32, device=student.device)
        agrees = torch.empty(student.shape[0], dtype=torch.bool, device=student.device)
        for begin in range(0, student.shape[0], chunk_rows(head.shape[0])):
            rows = slice(begin, begin + chunk_rows(head.shape[0]))
            p = (teacher[rows] @ guide.T).float().softmax(-1)
            log_q = (student[rows] @ head.T).float().log_softmax(-1)
            loss -= ((p * log_q).sum(-1) * weights[rows]).sum()
            agrees[rows] = p.argmax(-1) == log_q.argmax(-1)
            q = log_q.exp_()
            grad = q - p
            if variation_weight:
                loss += variation_weight * 0.5 * (grad.abs().sum(-1) * weights[rows]).sum()
                sign = grad.sign()
                sign -= (sign * q).sum(-1, keepdim=True)
                grad += sign.mul_(q).mul_(0.5 * variation_weight)
            grad = grad.mul_(weights[rows, None]).to(dtype)
            grad_student[rows] = grad @ head
            if grad_head is not None:
                grad_head += (grad.T @ student[rows]).float()
        ctx.save_for_backward(grad_student, grad_head)
        ctx.mark_non_differentiable(agrees)
        return loss, agrees

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_student, grad_head = ctx.saved_tensors
        return grad_student * grad_loss, None if grad_head is None else grad_head * grad_loss, None, None, None, None


@torch.no_grad()
def top_tokens(student: Tensor, student_head: Tensor) -> Tensor:
    """The likeliest vocabulary index of each row: [rows]"""
    head = student_head.to(student.dtype)
    chunks = torch.split(student, chunk_rows(head.shape[0]))
    return torch.cat([(chunk @ head.T).argmax(-1) for chunk in chunks])
