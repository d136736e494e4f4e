"""Fine-tune an encoder with labels. Page: docs/evaluation.md.

- `finetune`: the method `finetune`, which pretraining's loop, engines and checkpoints train: encoder and classifier.
- `rand_augment`, `mixing`: RandAugment, random erasing, mixup and CutMix, on the device, in this order.
- `lora`: low-rank updates, which are trained in place of the encoder's own weights. Files hold the sum.
- `command`: the command `tessera finetune`, whose flags become those of `tessera pretrain --method finetune`.

The core trains any method with `supervised = True` on labels, and scores its `logits` (`pretrain.monitoring.online`).
"""
