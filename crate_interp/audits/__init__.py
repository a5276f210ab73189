"""The audit: what the papers claim of a layer, measured by layer and sample."""

from crate_interp.audits.result import AuditResult
from crate_interp.audits.run import audit

__all__ = ["AuditResult", "audit"]
