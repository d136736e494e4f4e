import torch

from tessera.evaluation.accuracy import UNRANKED, true_class_rank


def test_rank_of_the_true_class():
    scores = torch.tensor([[0.1, 0.5, 0.5, 0.2], [3.0, 1.0, 2.0, 0.0]])
    found = [true_class_rank(scores, torch.tensor([c, c])).tolist() for c in range(4)]
    assert found == [[3, 0], [0, 2], [1, 1], [2, 3]]


def test_a_diverged_classifier_is_not_right_by_accident():
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[nan, nan, nan], [nan, 0.0, 1.0], [0.0, inf, 1.0]])
    assert true_class_rank(scores, torch.tensor([0, 2, 0])).tolist() == [UNRANKED, 1, 2]
