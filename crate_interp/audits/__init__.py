"""The layer contract audit: what the papers claim of a layer, measured layer by layer and sample by sample."""

from crate_interp.audits.result import AuditResult
from crate_interp.audits.run import audit

__all__ = ["AuditResult", "audit"]
