"""Eight simulated devices, and hypothesis without chance or clock."""

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)

hypothesis.settings.register_profile(
  "repeatable", derandomize=True, deadline=None, max_examples=50
)
hypothesis.settings.load_profile("repeatable")
