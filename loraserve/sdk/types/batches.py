"""Files, and batches of requests in them."""

from __future__ import annotations

from loraserve.contract.batch import Batch as Batch
from loraserve.contract.batch import DeletedFile as DeletedFile
from loraserve.contract.batch import File as File
from loraserve.contract.batch import RequestCounts as RequestCounts
