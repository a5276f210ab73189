"""The audit, which measures each layer on each sample against the claims of the papers."""

from crate_interp.audits.result import AuditResult
from crate_interp.audits.run import audit

__all__ = ["AuditResult", "audit"]
