"""The reference: torch's own `GradScaler` and SGD on the streams of `cases`."""

import numpy as np
import torch

from .cases import LEARNING_RATE, MOMENTUM, SIZE, Case, streams
from .trajectory import Trajectory, require_normal_scales, trajectory


def run(case: Case, device: str = "cpu") -> Trajectory:
    """Runs a case with `torch.amp.GradScaler(device)`.

    Raises:
      Mismatch: the stream pushes the scale below 2**-126.
    """
    arrays = streams(case)
    base, poison = (torch.from_numpy(array).to(device) for array in arrays)
    scaler = torch.amp.GradScaler(device, **case.scaler_kwargs)
    params = [
        torch.zeros(SIZE, device=device, requires_grad=True)
        for _ in range(case.n_optimizers)
    ]
    optimizers = [
        torch.optim.SGD([p], lr=LEARNING_RATE, momentum=MOMENTUM) for p in params
    ]
    stepped: set[int] = set()
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda opt, *_: stepped.add(id(opt)))

    records = []
    for step in range(case.steps):
        for method, value in case.setters(step):
            getattr(scaler, method)(value)
        stepped.clear()
        for index, (param, optimizer) in enumerate(
            zip(params, optimizers, strict=True)
        ):
            scaled, poisons = scaler.scale(base[step, index]), poison[step, index]
            param.grad = torch.where(poisons == 0, scaled, poisons)
            if case.unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update(case.new_scale(step))
        records.append(
            (
                scaler.get_scale(),
                scaler.state_dict().get("_growth_tracker", 0),
                [id(optimizer) not in stepped for optimizer in optimizers],
                torch.stack([param.detach() for param in params]).cpu().numpy(),
            )
        )
    result = trajectory(*map(np.array, zip(*records, strict=True)))
    require_normal_scales(case, result)
    return result


def run_scale(
    case: Case, found_inf: np.ndarray, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the tracker alone, from the kernel behind torch's `update`.

    Args:
      case: the configuration.
      found_inf: bool [steps].
      device: where the kernel runs.

    Returns:
      float32 [steps] scales and int32 [steps] trackers.
    """
    flags = (torch.zeros((), device=device), torch.ones((), device=device))
    scale = torch.full((), case.init_scale, device=device)
    tracker = torch.zeros((), dtype=torch.int32, device=device)
    config = (case.growth_factor, case.backoff_factor, case.growth_interval)
    update_scale = torch.ops.aten._amp_update_scale_  # what GradScaler.update calls
    scales = np.empty(len(found_inf), np.float32)
    trackers = np.empty(len(found_inf), np.int32)
    for step, flag in enumerate(found_inf.tolist()):
        update_scale(scale, tracker, flags[flag], *config)
        scales[step], trackers[step] = scale.item(), tracker.item()
    return scales, trackers
