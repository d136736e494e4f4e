"""Losses of self-supervised learning as naive loops: the expected values of `tessera conformance`.

The functions share no code with `tessera.pretrain`. They compute in the precision of their arguments, which is float64
in `tessera conformance` and in the tests, and are too slow for training. An adapter has functions of the same names
with the same arguments, so this module is an adapter itself.

Where a paper leaves a convention open, the functions follow the official code of the paper, and a paragraph
"Convention" states it.

Shape letters: B images; G global crops and S crops of an image, global crops first; N crops or rows; P tokens of a
crop; K prototypes; D width; V views; M directions; T steps.
"""

import math

import torch
from torch import Tensor


def dino_loss(
    student: Tensor, teacher: Tensor, center: Tensor, student_temperature: float, teacher_temperature: float
) -> Tensor:
    """Return the cross-entropy of DINO (2104.14294) between the crops of an image.

    Convention (facebookresearch/dino, main_dino.py): the mean over all pairs of a teacher's and a student's crop that
    are not the same crop, and over images.

    Args:
        student: (S, B, K) logits of the student.
        teacher: (G, B, K) logits of the teacher, which are centred and sharpened here. They need no gradient.
        center: (K,) centre, which is subtracted from the teacher's logits.
        student_temperature: softmax temperature of the student.
        teacher_temperature: softmax temperature of the teacher.
    """
    terms = []
    for g in range(len(teacher)):
        target = torch.softmax((teacher[g] - center) / teacher_temperature, dim=-1)
        for s in range(len(student)):
            if s != g:
                terms.append(_cross_entropy(target, student[s] / student_temperature).mean())
    return torch.stack(terms).mean()


def ibot_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    center: Tensor,
    student_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    """Return the cross-entropy of iBOT (2111.07832) between teacher and student over hidden tokens.

    Convention (bytedance/ibot, main_ibot.py; facebookresearch/dinov2, ibot_patch_loss.py): the mean over crops of the
    mean over the hidden tokens of a crop. The loss of a crop without hidden tokens is 0, and it counts as a crop.

    Args:
        student: (N, P, K) logits of the student for all tokens. Those of visible tokens have no effect.
        teacher: (N, P, K) logits of the teacher. They need no gradient.
        mask: (N, P) bool, True for hidden tokens.
        center: (K,) centre, which is subtracted from the teacher's logits.
        student_temperature: softmax temperature of the student.
        teacher_temperature: softmax temperature of the teacher.
    """
    total = student.new_zeros(())
    for n in range(len(student)):
        hidden = mask[n].nonzero().flatten().tolist()
        for p in hidden:
            target = torch.softmax((teacher[n, p] - center) / teacher_temperature, dim=-1)
            total = total + _cross_entropy(target, student[n, p] / student_temperature) / len(hidden)
    return total / len(student)


def koleo_loss(features: Tensor) -> Tensor:
    """Return the KoLeo loss (1806.03198) of normalised features: - mean of the log of the distance to the nearest row.

    Convention (facebookresearch/dinov2, koleo_loss.py): the distance of normalised features, without its square and
    without a factor; the gradient also reaches the nearest row. The official code adds 1e-8 to the distance. The
    smallest distance of the cases is near 0.01, where this has no effect within the tolerance.

    Args:
        features: (B, D) features of one crop of each image.
    """
    rows = [row / row.norm() for row in features]
    nearest = [torch.stack([(x - y).norm() for j, y in enumerate(rows) if j != i]).min() for i, x in enumerate(rows)]
    return -torch.stack([(distance + 1e-8).log() for distance in nearest]).mean()


def sinkhorn(logits: Tensor, temperature: float) -> Tensor:
    """Return Sinkhorn-Knopp assignments (2006.09882) after three iterations: (N, K), each row a distribution.

    Convention (facebookresearch/dinov2, dino_clstoken_loss.py): an iteration first scales each prototype to a sum of
    N / K, and then each row to a sum of 1.

    Args:
        logits: (N, K) logits of the teacher.
        temperature: the logits are divided by the temperature.
    """
    assignment = (logits / temperature).exp()
    count, prototypes = logits.shape
    for _ in range(3):
        for k in range(prototypes):
            assignment[:, k] *= count / prototypes / assignment[:, k].sum()
        for n in range(count):
            assignment[n] /= assignment[n].sum()
    return assignment


def gram_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the Gram loss of DINOv3 (2508.10104), the squared difference of cosine similarities of tokens.

    Convention (facebookresearch/dinov3, gram_loss.py, with the settings of the configuration for Gram anchoring): the
    mean over crops and over all P * P pairs of tokens of the same crop. A pair of a token with itself counts, with
    difference 0. Negative similarities stay.

    Args:
        student: (N, P, D) tokens of the student.
        teacher: (N, P, D) tokens of the Gram teacher. They need no gradient.
    """
    squares = []
    for crops in zip(student, teacher, strict=True):
        for p in range(len(crops[0])):
            for q in range(len(crops[0])):
                ours, theirs = ((x[p] @ x[q]) / (x[p].norm() * x[q].norm()) for x in crops)
                squares.append((ours - theirs) ** 2)
    return torch.stack(squares).mean()


def sigreg(embeddings: Tensor, directions: Tensor) -> Tensor:
    """Return SIGReg of LeJEPA (2511.08544), the Epps-Pulley statistic of normality along directions.

    Convention (the authors' code, lejepa/univariate/epps_pulley.py and MINIMAL.md; the listing of the paper integrates
    from -5 to 5): the trapezoid rule with points from 0 to 3 in 16 steps, doubled, which is the rule from -3 to 3 in 32
    steps; the weight exp(-t^2 / 2); the statistic is multiplied by the number of images. Each view has a statistic of
    its own, and the result is the mean over views and directions.

    Args:
        embeddings: (V, B, D) embeddings of V views.
        directions: (D, M) unit vectors, in the place of those that a library draws.
    """
    statistics = []
    points = torch.linspace(-3, 3, 33, dtype=torch.float64).tolist()
    for view in embeddings:
        for direction in directions.T:
            x = (view * direction).sum(1)
            total = x.new_zeros(())
            for t in points:
                phi = math.exp(-t * t / 2)
                distance = (torch.cos(t * x).mean() - phi) ** 2 + torch.sin(t * x).mean() ** 2
                total = total + distance * phi * (6 / 32) * (0.5 if abs(t) == 3 else 1)
            statistics.append(len(view) * total)
    return torch.stack(statistics).mean()


def mae_loss(predicted: Tensor, patches: Tensor, mask: Tensor) -> Tensor:
    """Return the loss of MAE (2111.06377) with targets that are normalised for each patch.

    Convention (facebookresearch/mae, models_mae.py): the variance of a patch is the unbiased one, and 1e-6 is added to
    the variance, not to the standard deviation. The mean is over pixels and over the hidden tokens of all images, which
    all have the same number of hidden tokens.

    Args:
        predicted: (B, P, D) predicted pixels of each patch.
        patches: (B, P, D) pixels of each patch, which are normalised here.
        mask: (B, P) bool, True for hidden patches.
    """
    errors = []
    for b, p in mask.nonzero().tolist():
        pixels = patches[b, p]
        mean = pixels.mean()
        variance = ((pixels - mean) ** 2).sum() / (len(pixels) - 1)
        errors.append(((predicted[b, p] - (pixels - mean) / (variance + 1e-6).sqrt()) ** 2).mean())
    return torch.stack(errors).mean()


def center_updates(logits: Tensor, momentum: float) -> Tensor:
    """Return the centre of DINO (2104.14294) after each step: (T, K).

    Convention (facebookresearch/dino, main_dino.py): the centre starts at 0, and moves to the mean over the rows.

    Args:
        logits: (T, N, K) logits of the teacher at each step.
        momentum: the centre becomes momentum * centre + (1 - momentum) * mean.
    """
    centers = [torch.zeros_like(logits[0, 0])]
    for rows in logits:
        centers.append(momentum * centers[-1] + (1 - momentum) * rows.mean(0))
    return torch.stack(centers[1:])


def teacher_updates(weights: Tensor, momentum: float) -> Tensor:
    """Return the weights of a teacher, the moving average of a student (2104.14294), after each step: (T, D).

    Args:
        weights: (T + 1, D) weights of the student: first those from which student and teacher start, and then those
            after each step.
        momentum: the teacher becomes momentum * teacher + (1 - momentum) * student.
    """
    teachers = [weights[0]]
    for student in weights[1:]:
        teachers.append(momentum * teachers[-1] + (1 - momentum) * student)
    return torch.stack(teachers[1:])


def _cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    return -(target * torch.log_softmax(logits, dim=-1)).sum(-1)
