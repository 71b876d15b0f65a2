"""tunix's GRPO: rollouts, rewards and accumulated gradients, with a small Qwen3."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jamp

from ..models.source import Checkouts
from .conversion import AUTOCAST, Edit, above
from .record import STEPS, Outcome, recorded

FILE = "tunix/sft/peft_trainer.py"
WORDS = ["<pad>", "<s>", "</s>", *(f"w{n}" for n in range(61))]
HARNESS = ()
REGION = (
    above(FILE, "import jax", "import jamp"),
    above(FILE, "def diff_fn(model, *args, **kwargs):", AUTOCAST),
)
SCALING = (
    above(
        FILE,
        "self.optimizer = nnx.Optimizer(self.model, optimizer, wrt=wrt_target)",
        "optimizer = jamp.dynamic_loss_scale(optimizer, SCALE)",
    ),
    Edit(
        FILE,
        "return out.primary_loss.unreduced_sum, out",
        [
            "loss = out.primary_loss.unreduced_sum",
            "return jamp.scale_loss(loss, optimizer.opt_state), out",
        ],
    ),
)


class Tokenizer:
    """Words separated by spaces."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [WORDS.index(word) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(WORDS[int(n)] for n in ids)

    def pad_id(self) -> int:
        return 0

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of the words that have an even number."""
    return [
        float(np.mean([WORDS.index(word) % 2 == 0 for word in text.split()] or [0]))
        for text in completions
    ]


def run(checkouts: Checkouts) -> Outcome:
    """`GRPOLearner.train`, whose steps are `PeftTrainer._train_step`."""
    qwen3, engine, grpo, rollout, adapter = checkouts.modules(
        "tunix",
        "tunix.models.qwen3.model",
        "tunix.rl.rl_cluster",
        "tunix.rl.grpo.grpo_learner",
        "tunix.rl.rollout.base_rollout",
        "tunix.generate.tokenizer_adapter",
    )
    adapter.spm.SentencePieceProcessor = str  # a class that the tokenizer is not of

    def model():
        config = qwen3.ModelConfig(
            num_layers=2,
            vocab_size=len(WORDS),
            embed_dim=32,
            hidden_dim=64,
            num_heads=4,
            head_dim=16,
            num_kv_heads=2,
            rope_theta=10_000,
            norm_eps=1e-6,
        )
        return qwen3.Qwen3(config, rngs=nnx.Rngs(0))

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    trainer = engine.RLEngine(
        actor=model(),
        reference=model(),
        tokenizer=Tokenizer(),
        cluster_config=engine.ClusterConfig(
            role_to_mesh=dict.fromkeys(
                (engine.Role.ACTOR, engine.Role.REFERENCE, engine.Role.ROLLOUT), mesh
            ),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=engine.RLTrainingConfig(
                actor_optimizer=recorded(optax.adamw(1e-4)),
                eval_every_n_steps=1000,
                max_steps=STEPS,
                mini_batch_size=2,
                train_micro_batch_size=1,
            ),
            rollout_config=rollout.RolloutConfig(
                max_tokens_to_generate=16,
                max_prompt_length=16,
                kv_cache_size=64,
            ),
        ),
    )
    learner = grpo.GRPOLearner(
        rl_engine=trainer,
        reward_fns=reward,
        algo_config=grpo.GRPOConfig(num_generations=4, num_iterations=1),
    )
    rng = np.random.default_rng(0)
    data = [
        {"prompts": [" ".join(rng.choice(WORDS[3:], 8)) for _ in range(2)]}
        for _ in range(STEPS)
    ]
    peft, losses, examples = trainer.actor_trainer, [], []
    write, prepare = peft._write_metrics, peft._prepare_inputs
    peft._write_metrics = lambda buffer: (losses.append(buffer.loss), write(buffer))
    peft._prepare_inputs = lambda x: (examples.append(x), prepare(x))[1]
    learner.train(data)
    optimizer = peft.optimizer
    explained = jamp.debug.explain(peft._train_step)(
        peft.model, optimizer, peft.grad_accumulator, examples[0], jnp.array(True)
    )
    products = explained.matmul_flops
    params = nnx.to_pure_dict(nnx.state(peft.model, nnx.Param))
    return Outcome(losses, params, optimizer.opt_state, products)
