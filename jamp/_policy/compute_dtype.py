"""The dtype that parameters are cast to when a module under a policy reads them.

JAX keys its caches by it. So it is made when jamp is imported, and not with the
policies: a context that is made later makes JAX trace every jitted function again.
"""

import jax

COMPUTE_DTYPE = jax.make_user_context(None)  # a dtype, or None
