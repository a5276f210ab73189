"""The audit: measures a layer against the claims of the papers, by layer and sample."""

from crate_interp.audits.result import AuditResult
from crate_interp.audits.run import audit

__all__ = ["AuditResult", "audit"]
