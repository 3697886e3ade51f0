"""Queries of pg_catalog that list the objects of some schemas; ``:schemas`` is an array of their names."""

from __future__ import annotations

import sqlalchemy as sa

_TRIGGERS = """
    SELECT n.nspname AS schema, c.relname AS table, t.tgname AS name, t.tgtype::int AS type,
           t.tgenabled::text AS enabled, t.tgoldtable AS old, t.tgnewtable AS new,
           f.pronamespace = c.relnamespace AND t.tgnargs = 0 AND t.tgconstraint = 0
             AND t.tgattr::text = '' AS plain,
           f.proname AS function, pg_get_triggerdef(t.oid) AS definition,
           ARRAY(SELECT a.attname::text FROM pg_depend AS d
                 JOIN pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
                 WHERE d.classid = 'pg_trigger'::regclass AND d.objid = t.oid
                   AND d.refclassid = 'pg_class'::regclass AND d.refobjsubid > 0) AS columns
    FROM pg_trigger AS t
    JOIN pg_class AS c ON c.oid = t.tgrelid
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_proc AS f ON f.oid = t.tgfoid
    WHERE NOT t.tgisinternal AND t.tgparentid = 0 AND n.nspname = ANY (:schemas)
"""
_IN_ORDER = " ORDER BY n.nspname, c.relname, t.tgname"

TRIGGERS = sa.text(f"{_TRIGGERS}{_IN_ORDER}")
"""Triggers of tables, with the columns that their conditions name."""

TRIGGERS_OF_TABLES = sa.text(f"{_TRIGGERS} AND c.relname = ANY (:tables){_IN_ORDER}")
"""Those of some tables. Printing the definition of a trigger waits for the lock of its table."""

FUNCTIONS = sa.text("""
    SELECT n.nspname AS schema, f.proname AS name, s.arguments, pg_get_function_result(f.oid) AS returns,
           f.prosrc AS source,
           obj_description(f.oid, 'pg_proc') AS comment, pg_get_functiondef(f.oid) AS definition,
           format('COMMENT ON FUNCTION %I.%I(%s) IS %L', n.nspname, f.proname, s.arguments,
             obj_description(f.oid, 'pg_proc')) AS comment_statement,
           coalesce(f.proconfig[1], '') LIKE 'search_path=%' AS has_search_path,
           f.proconfig[1] = 'search_path=' || current_setting('search_path') AS has_session_search_path,
           f.prosecdef AS definer, public.allowed AS public,
           f.proconfig[1] = 'search_path=pg_catalog, ' || quote_ident(n.nspname) || ', pg_temp'
             AND NOT public.allowed AS restricted,
           l.lanname = 'plpgsql' AND f.provolatile = 'v' AND NOT f.proisstrict
             AND f.proparallel = 'u' AND f.procost = 100 AND NOT f.proleakproof
             AND CASE WHEN f.proconfig[1] LIKE 'search_path=%' THEN f.proconfig[2:] ELSE f.proconfig END
               = CASE f.prorettype WHEN 'trigger'::regtype THEN ARRAY['enable_seqscan=off']
                 ELSE ARRAY['enable_seqscan=off', 'plan_cache_mode=force_generic_plan'] END AS plain
    FROM pg_proc AS f
    JOIN pg_namespace AS n ON n.oid = f.pronamespace
    JOIN pg_language AS l ON l.oid = f.prolang
    CROSS JOIN LATERAL (SELECT pg_get_function_identity_arguments(f.oid)) AS s (arguments)
    CROSS JOIN LATERAL (
      SELECT EXISTS (SELECT FROM aclexplode(coalesce(f.proacl, acldefault('f', f.proowner))) WHERE grantee = 0)
    ) AS public (allowed)
    WHERE (f.prorettype = 'trigger'::regtype OR f.prokind = 'f' AND starts_with(f.proname, 'sqlaqueue_'))
      AND n.nspname = ANY (:schemas)
    ORDER BY n.nspname, f.proname
""")
"""Functions of triggers, and those with a name of this library, with what
:class:`~sqlaqueue.postgresql.catalog.reflected_objects.ReflectedFunction` describes.
"""

STORAGE_PARAMETERS = sa.text("""
    SELECT n.nspname, c.relname, c.reloptions
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND c.reloptions IS NOT NULL AND n.nspname = ANY (:schemas)
""")

TABLES = sa.text("""
    SELECT n.nspname, c.relname, c.relkind = 'p'
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND n.nspname = ANY (:schemas)
""")
"""Tables, and whether they are partitioned."""

PARTITIONS = sa.text("""
    SELECT n.nspname, c.relname, m.nspname, r.relname
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_class AS r ON r.oid = pg_partition_root(c.oid)
    JOIN pg_namespace AS m ON m.oid = r.relnamespace
    WHERE c.relispartition AND c.relkind IN ('r', 'p', 'f') AND n.nspname = ANY (:schemas)
""")
"""Partitions, each with the partitioned table at the top."""

INDEXES = sa.text("""
    SELECT n.nspname, i.relname, x.indisvalid, pg_get_expr(x.indpred, x.indrelid),
           CASE WHEN x.indisunique THEN substring(pg_get_indexdef(x.indexrelid) FROM ' USING .*') END
    FROM pg_index AS x
    JOIN pg_class AS i ON i.oid = x.indexrelid
    JOIN pg_namespace AS n ON n.oid = i.relnamespace
    WHERE n.nspname = ANY (:schemas)
""")
"""Indexes, with their predicates; of unique ones the definition after the name of the table."""

CHECK_CONSTRAINTS = sa.text("""
    SELECT n.nspname, c.relname, k.conname, pg_get_expr(k.conbin, k.conrelid),
           (SELECT array_agg(a.attname::text) FROM pg_attribute AS a
            WHERE a.attrelid = c.oid AND a.attnum = ANY (k.conkey))
    FROM pg_constraint AS k
    JOIN pg_class AS c ON c.oid = k.conrelid
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE k.contype = 'c' AND n.nspname = ANY (:schemas)
    ORDER BY k.conname
""")

ENUMS = sa.text("""
    SELECT n.nspname, t.typname, pg_type_is_visible(t.oid),
           (SELECT array_agg(DISTINCT c.relname::text)
            FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
            WHERE a.atttypid = t.oid AND NOT a.attisdropped AND c.relkind IN ('r', 'p'))
    FROM pg_type AS t JOIN pg_namespace AS n ON n.oid = t.typnamespace
    WHERE t.typtype = 'e' AND (n.nspname = ANY (:schemas) OR pg_type_is_visible(t.oid))
""")
"""Enum types, with the tables that have a column of the type."""

VISIBLE_TABLES = sa.text("""
    SELECT c.relname, n.nspname
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't' AND n.nspname <> 'pg_catalog'
      AND pg_table_is_visible(c.oid)
""")
"""The tables that an unqualified name finds, each with its schema."""
