"""Facts for the doctor: what is wrong with the objects of a queue, and the SQL that repairs it."""

from __future__ import annotations

from sqlaqueue.postgresql.diagnosis.functions import function_faults, trigger_faults
from sqlaqueue.postgresql.diagnosis.indexes import index_faults
from sqlaqueue.postgresql.diagnosis.plans import disabled_plans, whole_reads
from sqlaqueue.postgresql.diagnosis.sql import sql_text, table_name
from sqlaqueue.postgresql.diagnosis.tables import missing_columns, missing_tables, split_schemas
from sqlaqueue.postgresql.diagnosis.transaction import read_only

__all__ = [
    "disabled_plans",
    "function_faults",
    "index_faults",
    "missing_columns",
    "missing_tables",
    "read_only",
    "split_schemas",
    "sql_text",
    "table_name",
    "trigger_faults",
    "whole_reads",
]
