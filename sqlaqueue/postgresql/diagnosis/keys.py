"""The sequences that generate integer keys, and how many numbers are left."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from sqlaqueue.postgresql.diagnosis.relations import table_oid
from sqlaqueue.queue.server_facts import KeySequence

# A default that calls nextval() depends on the sequence, whether the column owns it or not; the sequence of an identity
# column depends on the column. pg_sequence_last_value() is NULL until the first number.
_SEQUENCES = sa.text("""
    SELECT format('%I.%I', n.nspname, c.relname) AS "table", format('%I.%I', m.nspname, q.relname) AS sequence,
           quote_ident(a.attname) AS "column", format_type(a.atttypid, NULL) AS column_type,
           format_type(s.seqtypid, NULL) AS sequence_type, a.attidentity <> '' AS identity,
           CASE WHEN has_sequence_privilege(q.oid, 'USAGE, SELECT') THEN pg_sequence_last_value(q.oid) END AS last,
           s.seqmax AS sequence_limit,
           CASE a.atttypid WHEN 'int2'::regtype THEN 32767 WHEN 'int4'::regtype THEN 2147483647
             ELSE 9223372036854775807 END AS column_limit
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_index AS x ON x.indrelid = c.oid AND x.indisprimary
    JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = ANY (x.indkey::int2[])
    JOIN pg_depend AS d ON a.attidentity <> '' AND d.classid = 'pg_class'::regclass AND d.deptype = 'i'
           AND d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid AND d.refobjsubid = a.attnum
         OR a.attidentity = '' AND d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass
           AND d.objid = (SELECT e.oid FROM pg_attrdef AS e WHERE e.adrelid = c.oid AND e.adnum = a.attnum)
    JOIN pg_sequence AS s ON s.seqrelid = CASE a.attidentity WHEN '' THEN d.refobjid ELSE d.objid END
    JOIN pg_class AS q ON q.oid = s.seqrelid
    JOIN pg_namespace AS m ON m.oid = q.relnamespace
    WHERE c.oid = CAST(CAST(:oid AS bigint) AS oid) AND s.seqincrement > 0 AND NOT s.seqcycle
      AND a.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype)
    ORDER BY a.attnum
""")


def key_sequences(connection: sa.Connection, table: sa.Table) -> Sequence[KeySequence]:
    """Return the sequences of the integer columns of a table's primary key."""
    found = connection.execute(_SEQUENCES, {"oid": table_oid(connection, table)}).mappings()
    return [KeySequence(**row) for row in found]
