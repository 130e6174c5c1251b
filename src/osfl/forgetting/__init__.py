"""Exact forgetting: what a client said is deleted, and the server phase is repeated as if it had never been said.

    asking.py         what is to go, and every reason to refuse, before anything is touched
    carrying_out.py   the steps; a kill anywhere costs nothing, the same command goes on
    proof.py          the certificate's claims, looked at again

docs/forgetting.md says what is exact and what nobody can take back.
"""

from osfl.forgetting.carrying_out import forget
from osfl.forgetting.proof import Finding, verify

__all__ = ["Finding", "forget", "verify"]
