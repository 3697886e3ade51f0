-- == create_all ==

ALTER TABLE sqlaqueue_message_email SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0)

COMMENT ON FUNCTION sqlaqueue_message_email_sync() IS 'sqlaqueue, version 3'

COMMENT ON FUNCTION sqlaqueue_wake_email() IS 'sqlaqueue, version 5'

COMMENT ON TABLE sqlaqueue_consumer IS 'sqlaqueue, as of 0.1, for 0.1 and newer'

COMMENT ON TABLE sqlaqueue_control IS 'sqlaqueue, as of 0.1, for 0.1 and newer'

COMMENT ON TABLE sqlaqueue_crash_journal IS 'sqlaqueue, as of 0.1, for 0.1 and newer'

COMMENT ON TABLE sqlaqueue_message_email IS 'sqlaqueue, as of 0.1, for 0.1 and newer'

CREATE INDEX ix_sqlaqueue_message_email_claim ON sqlaqueue_message_email (priority, run_at, id)

CREATE OR REPLACE FUNCTION sqlaqueue_message_email_sync() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off AS $sqlaqueue$
#variable_conflict use_column
BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    DELETE FROM sqlaqueue_message_email;
    RETURN NULL;
  END IF;
  IF TG_OP = 'INSERT' THEN
    INSERT INTO sqlaqueue_message_email (id, priority, run_at)
      SELECT id, priority, run_at FROM new_rows WHERE status OPERATOR(pg_catalog.=) 'pending'
      ON CONFLICT (id) DO UPDATE SET priority = excluded.priority, run_at = excluded.run_at;
    RETURN NULL;
  END IF;
  IF TG_OP = 'DELETE' THEN
    DELETE FROM sqlaqueue_message_email WHERE id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT id FROM old_rows));
    RETURN NULL;
  END IF;
  DELETE FROM sqlaqueue_message_email WHERE id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT id FROM old_rows WHERE status OPERATOR(pg_catalog.=) 'pending'
           EXCEPT SELECT id FROM new_rows WHERE status OPERATOR(pg_catalog.=) 'pending'));
  INSERT INTO sqlaqueue_message_email (id, priority, run_at)
    SELECT id, priority, run_at FROM new_rows WHERE status OPERATOR(pg_catalog.=) 'pending'
    EXCEPT SELECT id, priority, run_at FROM old_rows WHERE status OPERATOR(pg_catalog.=) 'pending'
    ON CONFLICT (id) DO UPDATE SET priority = excluded.priority, run_at = excluded.run_at;
  RETURN NULL;
END
$sqlaqueue$

CREATE OR REPLACE FUNCTION sqlaqueue_wake_email() RETURNS trigger
LANGUAGE plpgsql AS $sqlaqueue$
#variable_conflict use_column
DECLARE
  sqlaqueue_jobs bigint := 1;
  sqlaqueue_first timestamp with time zone;
  sqlaqueue_last timestamp with time zone;
  sqlaqueue_due double precision;
BEGIN
  IF TG_LEVEL OPERATOR(pg_catalog.=) 'ROW' THEN
    sqlaqueue_first := NEW.run_at::timestamp with time zone;
    sqlaqueue_last := sqlaqueue_first;
  END IF;
  -- An error, as of a server that has no room for another lock, must not fail the statement.
  BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock_shared(-1198770154, 1454603602) THEN
      RETURN NULL;
    END IF;
  EXCEPTION WHEN OTHERS THEN
  END;
  IF TG_LEVEL OPERATOR(pg_catalog.=) 'STATEMENT' THEN
    SELECT pg_catalog.count(*), pg_catalog.min(run_at)::timestamp with time zone, pg_catalog.max(run_at)::timestamp with time zone INTO sqlaqueue_jobs, sqlaqueue_first, sqlaqueue_last
      FROM new_rows
      WHERE status OPERATOR(pg_catalog.=) 'pending';
  END IF;
  IF sqlaqueue_jobs OPERATOR(pg_catalog.=) 0 THEN
    RETURN NULL;
  END IF;
  IF sqlaqueue_last OPERATOR(pg_catalog.>) pg_catalog.statement_timestamp() THEN
    sqlaqueue_due := extract(epoch FROM greatest(sqlaqueue_first, pg_catalog.statement_timestamp()));
    IF TG_LEVEL OPERATOR(pg_catalog.=) 'ROW' THEN
      sqlaqueue_due := 0.05::double precision OPERATOR(pg_catalog.*)
        pg_catalog.ceil(sqlaqueue_due OPERATOR(pg_catalog./) 0.05::double precision);
    END IF;
  END IF;
  PERFORM pg_catalog.pg_notify('sqlaqueue_email_email', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$sqlaqueue$

CREATE TABLE email (
	id SERIAL NOT NULL,
	"to" VARCHAR NOT NULL,
	status VARCHAR(20) DEFAULT 'pending' NOT NULL,
	priority SMALLINT DEFAULT 0 NOT NULL,
	run_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
	attempts INTEGER DEFAULT 0 NOT NULL,
	max_attempts SMALLINT,
	last_error TEXT,
	created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
	finished_at TIMESTAMP WITH TIME ZONE,
	PRIMARY KEY (id)
)

CREATE TABLE sqlaqueue_consumer (
	id TEXT NOT NULL,
	queue TEXT NOT NULL,
	name TEXT,
	host TEXT NOT NULL,
	pid INTEGER NOT NULL,
	version TEXT NOT NULL,
	listening BOOLEAN NOT NULL,
	running JSONB NOT NULL,
	claimed INTEGER DEFAULT 0 NOT NULL,
	unclaimable JSONB DEFAULT '[]' NOT NULL,
	heartbeat_at TIMESTAMP WITH TIME ZONE NOT NULL,
	expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
	created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
	PRIMARY KEY (id)
)

CREATE TABLE sqlaqueue_control (
	queue TEXT NOT NULL,
	key JSONB NOT NULL,
	created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
	PRIMARY KEY (queue, key)
)

CREATE TABLE sqlaqueue_crash_journal (
	id UUID NOT NULL,
	queue TEXT NOT NULL,
	keys JSONB NOT NULL,
	starts INTEGER NOT NULL,
	worker TEXT,
	created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
	PRIMARY KEY (id)
)

CREATE TABLE sqlaqueue_message_email (
	id INTEGER NOT NULL,
	priority SMALLINT NOT NULL,
	run_at TIMESTAMP WITH TIME ZONE NOT NULL,
	PRIMARY KEY (id)
)

CREATE TRIGGER sqlaqueue_message_delete AFTER DELETE ON email REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT EXECUTE FUNCTION sqlaqueue_message_email_sync()

CREATE TRIGGER sqlaqueue_message_insert AFTER INSERT ON email REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION sqlaqueue_message_email_sync()

CREATE TRIGGER sqlaqueue_message_truncate AFTER TRUNCATE ON email FOR EACH STATEMENT EXECUTE FUNCTION sqlaqueue_message_email_sync()

CREATE TRIGGER sqlaqueue_message_update AFTER UPDATE ON email REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION sqlaqueue_message_email_sync()

CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON email REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION sqlaqueue_wake_email()

CREATE TRIGGER sqlaqueue_wake_update_22793158 AFTER UPDATE ON email FOR EACH ROW WHEN (NEW.status = 'pending' AND ((OLD.status = 'pending') IS NOT TRUE OR OLD.run_at IS DISTINCT FROM NEW.run_at)) EXECUTE FUNCTION sqlaqueue_wake_email()

-- == migration ==

# ### commands auto generated by Alembic - please adjust! ###
    op.create_table('email',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('to', sa.String(), nullable=False),
    sa.Column('status', sa.String(length=20), server_default=sa.text("'pending'"), nullable=False),
    sa.Column('priority', sa.SmallInteger(), server_default=sa.text('0'), nullable=False),
    sa.Column('run_at', sa.DateTime(timezone=True), server_default=sa.text('now()'), nullable=False),
    sa.Column('attempts', sa.Integer(), server_default=sa.text('0'), nullable=False),
    sa.Column('max_attempts', sa.SmallInteger(), nullable=True),
    sa.Column('last_error', sa.Text(), nullable=True),
    sa.Column('created_at', sa.DateTime(timezone=True), server_default=sa.text('now()'), nullable=False),
    sa.Column('finished_at', sa.DateTime(timezone=True), nullable=True),
    sa.PrimaryKeyConstraint('id')
    )
    op.create_table('sqlaqueue_consumer',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('queue', sa.Text(), nullable=False),
    sa.Column('name', sa.Text(), nullable=True),
    sa.Column('host', sa.Text(), nullable=False),
    sa.Column('pid', sa.Integer(), nullable=False),
    sa.Column('version', sa.Text(), nullable=False),
    sa.Column('listening', sa.Boolean(), nullable=False),
    sa.Column('running', postgresql.JSONB(astext_type=Text()), nullable=False),
    sa.Column('claimed', sa.Integer(), server_default=sa.text('0'), nullable=False),
    sa.Column('unclaimable', postgresql.JSONB(astext_type=Text()), server_default=sa.text("'[]'"), nullable=False),
    sa.Column('heartbeat_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('expires_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), server_default=sa.text('now()'), nullable=False),
    sa.PrimaryKeyConstraint('id'),
    comment='sqlaqueue, as of 0.1, for 0.1 and newer'
    )
    op.create_table('sqlaqueue_control',
    sa.Column('queue', sa.Text(), nullable=False),
    sa.Column('key', postgresql.JSONB(astext_type=Text()), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), server_default=sa.text('now()'), nullable=False),
    sa.PrimaryKeyConstraint('queue', 'key'),
    comment='sqlaqueue, as of 0.1, for 0.1 and newer'
    )
    op.create_table('sqlaqueue_crash_journal',
    sa.Column('id', sa.Uuid(), nullable=False),
    sa.Column('queue', sa.Text(), nullable=False),
    sa.Column('keys', postgresql.JSONB(astext_type=Text()), nullable=False),
    sa.Column('starts', sa.Integer(), nullable=False),
    sa.Column('worker', sa.Text(), nullable=True),
    sa.Column('created_at', sa.DateTime(timezone=True), server_default=sa.text('now()'), nullable=False),
    sa.PrimaryKeyConstraint('id'),
    comment='sqlaqueue, as of 0.1, for 0.1 and newer'
    )
    op.create_table('sqlaqueue_message_email',
    sa.Column('id', sa.Integer(), autoincrement=False, nullable=False),
    sa.Column('priority', sa.SmallInteger(), nullable=False),
    sa.Column('run_at', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('id'),
    comment='sqlaqueue, as of 0.1, for 0.1 and newer'
    )
    op.create_index(op.f('ix_sqlaqueue_message_email_claim'), 'sqlaqueue_message_email', ['priority', 'run_at', 'id'], unique=False)
    op.set_storage_parameters(
        'sqlaqueue_message_email',
        {
            'autovacuum_vacuum_scale_factor': '0',
            'autovacuum_vacuum_threshold': '5000',
            'autovacuum_vacuum_cost_delay': '0',
        },
    )
    op.create_queue_function(
        'sqlaqueue_wake_email',
        (
            '#variable_conflict use_column\n'
            'DECLARE\n'
            '  sqlaqueue_jobs bigint := 1;\n'
            '  sqlaqueue_first timestamp with time zone;\n'
            '  sqlaqueue_last timestamp with time zone;\n'
            '  sqlaqueue_due double precision;\n'
            'BEGIN\n'
            "  IF TG_LEVEL OPERATOR(pg_catalog.=) 'ROW' THEN\n"
            '    sqlaqueue_first := NEW.run_at::timestamp with time zone;\n'
            '    sqlaqueue_last := sqlaqueue_first;\n'
            '  END IF;\n'
            '  -- An error, as of a server that has no room for another lock, must not fail the statement.\n'
            '  BEGIN\n'
            '    IF pg_catalog.pg_try_advisory_xact_lock_shared(-1198770154, 1454603602) THEN\n'
            '      RETURN NULL;\n'
            '    END IF;\n'
            '  EXCEPTION WHEN OTHERS THEN\n'
            '  END;\n'
            "  IF TG_LEVEL OPERATOR(pg_catalog.=) 'STATEMENT' THEN\n"
            '    SELECT pg_catalog.count(*), pg_catalog.min(run_at)::timestamp with time zone, pg_catalog.max(run_at)::timestamp with time zone INTO sqlaqueue_jobs, sqlaqueue_first, sqlaqueue_last\n'
            '      FROM new_rows\n'
            "      WHERE status OPERATOR(pg_catalog.=) 'pending';\n"
            '  END IF;\n'
            '  IF sqlaqueue_jobs OPERATOR(pg_catalog.=) 0 THEN\n'
            '    RETURN NULL;\n'
            '  END IF;\n'
            '  IF sqlaqueue_last OPERATOR(pg_catalog.>) pg_catalog.statement_timestamp() THEN\n'
            '    sqlaqueue_due := extract(epoch FROM greatest(sqlaqueue_first, pg_catalog.statement_timestamp()));\n'
            "    IF TG_LEVEL OPERATOR(pg_catalog.=) 'ROW' THEN\n"
            '      sqlaqueue_due := 0.05::double precision OPERATOR(pg_catalog.*)\n'
            '        pg_catalog.ceil(sqlaqueue_due OPERATOR(pg_catalog./) 0.05::double precision);\n'
            '    END IF;\n'
            '  END IF;\n'
            "  PERFORM pg_catalog.pg_notify('sqlaqueue_email_email', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),\n"
            "    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));\n"
            '  RETURN NULL;\n'
            'END\n'
        ),
        comment='sqlaqueue, version 5',
        bare=True,
    )
    op.create_queue_function(
        'sqlaqueue_message_email_sync',
        (
            '#variable_conflict use_column\n'
            'BEGIN\n'
            "  IF TG_OP = 'TRUNCATE' THEN\n"
            '    DELETE FROM {messages};\n'
            '    RETURN NULL;\n'
            '  END IF;\n'
            "  IF TG_OP = 'INSERT' THEN\n"
            '    INSERT INTO {messages} (id, priority, run_at)\n'
            "      SELECT id, priority, run_at FROM new_rows WHERE status OPERATOR(pg_catalog.=) 'pending'\n"
            '      ON CONFLICT (id) DO UPDATE SET priority = excluded.priority, run_at = excluded.run_at;\n'
            '    RETURN NULL;\n'
            '  END IF;\n'
            "  IF TG_OP = 'DELETE' THEN\n"
            '    DELETE FROM {messages} WHERE id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT id FROM old_rows));\n'
            '    RETURN NULL;\n'
            '  END IF;\n'
            "  DELETE FROM {messages} WHERE id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT id FROM old_rows WHERE status OPERATOR(pg_catalog.=) 'pending'\n"
            "           EXCEPT SELECT id FROM new_rows WHERE status OPERATOR(pg_catalog.=) 'pending'));\n"
            '  INSERT INTO {messages} (id, priority, run_at)\n'
            "    SELECT id, priority, run_at FROM new_rows WHERE status OPERATOR(pg_catalog.=) 'pending'\n"
            "    EXCEPT SELECT id, priority, run_at FROM old_rows WHERE status OPERATOR(pg_catalog.=) 'pending'\n"
            '    ON CONFLICT (id) DO UPDATE SET priority = excluded.priority, run_at = excluded.run_at;\n'
            '  RETURN NULL;\n'
            'END\n'
        ),
        tables={'messages': 'sqlaqueue_message_email'},
        comment='sqlaqueue, version 3',
        definer=True,
    )
    op.create_queue_triggers(
        'email',
        'sqlaqueue_wake_email',
        {
            'sqlaqueue_wake_insert': ('INSERT', {'NEW': 'new_rows'}),
            'sqlaqueue_wake_update_22793158': (
                'UPDATE',
                {},
                "NEW.status = 'pending' AND ((OLD.status = 'pending') IS NOT TRUE OR OLD.run_at IS DISTINCT FROM NEW.run_at)",
            ),
        },
    )
    op.create_queue_triggers(
        'email',
        'sqlaqueue_message_email_sync',
        {
            'sqlaqueue_message_insert': ('INSERT', {'NEW': 'new_rows'}),
            'sqlaqueue_message_update': ('UPDATE', {'OLD': 'old_rows', 'NEW': 'new_rows'}),
            'sqlaqueue_message_delete': ('DELETE', {'OLD': 'old_rows'}),
            'sqlaqueue_message_truncate': ('TRUNCATE', {}),
        },
    )
    # ### end Alembic commands ###

# ### commands auto generated by Alembic - please adjust! ###
    op.drop_queue_triggers(
        'email',
        [
            'sqlaqueue_message_insert',
            'sqlaqueue_message_update',
            'sqlaqueue_message_delete',
            'sqlaqueue_message_truncate',
        ],
    )
    op.drop_queue_triggers('email', ['sqlaqueue_wake_insert', 'sqlaqueue_wake_update_22793158'])
    op.drop_queue_function('sqlaqueue_message_email_sync')
    op.drop_queue_function('sqlaqueue_wake_email')
    op.set_storage_parameters(
        'sqlaqueue_message_email',
        {
            'autovacuum_vacuum_scale_factor': None,
            'autovacuum_vacuum_threshold': None,
            'autovacuum_vacuum_cost_delay': None,
        },
    )
    op.drop_index(op.f('ix_sqlaqueue_message_email_claim'), table_name='sqlaqueue_message_email')
    op.drop_table('sqlaqueue_message_email')
    op.drop_table('sqlaqueue_crash_journal')
    op.drop_table('sqlaqueue_control')
    op.drop_table('sqlaqueue_consumer')
    op.drop_table('email')
    # ### end Alembic commands ###

-- == verbs ==

INSERT INTO email ("to") VALUES (%(to)s::VARCHAR) RETURNING email.id, email.status, email.priority, email.run_at, email.attempts, email.created_at

WITH sqlaqueue_picked AS
(SELECT sqlaqueue_found.id AS id, sqlaqueue_found."to" AS "to", sqlaqueue_found.status AS status, sqlaqueue_found.priority AS priority, sqlaqueue_found.run_at AS run_at, sqlaqueue_found.attempts AS attempts, sqlaqueue_found.max_attempts AS max_attempts, sqlaqueue_found.last_error AS last_error, sqlaqueue_found.created_at AS created_at, sqlaqueue_found.finished_at AS finished_at
FROM (SELECT sqlaqueue_each.id AS id, sqlaqueue_each."to" AS "to", sqlaqueue_each.status AS status, sqlaqueue_each.priority AS priority, sqlaqueue_each.run_at AS run_at, sqlaqueue_each.attempts AS attempts, sqlaqueue_each.max_attempts AS max_attempts, sqlaqueue_each.last_error AS last_error, sqlaqueue_each.created_at AS created_at, sqlaqueue_each.finished_at AS finished_at, 1 AS sqlaqueue_one
FROM generate_series(1, <n>) AS sqlaqueue_start JOIN LATERAL (SELECT email.id AS id, email."to" AS "to", email.status AS status, email.priority AS priority, email.run_at AS run_at, email.attempts AS attempts, email.max_attempts AS max_attempts, email.last_error AS last_error, email.created_at AS created_at, email.finished_at AS finished_at
FROM email, sqlaqueue_message_email, generate_series(1, (SELECT <n>)) AS sqlaqueue_thousand
WHERE NOT (EXISTS (SELECT <n>
FROM sqlaqueue_control
WHERE sqlaqueue_control.queue = %(queue_1)s::VARCHAR AND sqlaqueue_control.key = CAST('[]' AS JSONB))) AND (SELECT count(*) AS count_1
FROM generate_series(1, least(1 + <n> / 16, 100)) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL AND sqlaqueue_message_email.id = email.id AND CASE WHEN (email.status = 'pending') THEN true END AND sqlaqueue_message_email.run_at <= statement_timestamp() AND sqlaqueue_start.sqlaqueue_start IS NOT NULL AND sqlaqueue_thousand.sqlaqueue_thousand IS NOT NULL ORDER BY sqlaqueue_message_email.priority, sqlaqueue_message_email.run_at, sqlaqueue_message_email.id, sqlaqueue_message_email.priority, sqlaqueue_message_email.run_at, sqlaqueue_message_email.id
 LIMIT (SELECT <n> AS anon_1) FOR NO KEY UPDATE OF email, sqlaqueue_message_email SKIP LOCKED) AS sqlaqueue_each ON true
 LIMIT <n>) AS sqlaqueue_found
WHERE sqlaqueue_found.sqlaqueue_one = 1),
sqlaqueue_consumed AS
(DELETE FROM sqlaqueue_message_email WHERE sqlaqueue_message_email.id = ANY (array((SELECT sqlaqueue_picked.id
FROM sqlaqueue_picked))) RETURNING sqlaqueue_message_email.id AS id)
 SELECT sqlaqueue_picked.id, sqlaqueue_picked."to", sqlaqueue_picked.status, sqlaqueue_picked.priority, sqlaqueue_picked.run_at, sqlaqueue_picked.attempts, sqlaqueue_picked.max_attempts, sqlaqueue_picked.last_error, sqlaqueue_picked.created_at, sqlaqueue_picked.finished_at
FROM sqlaqueue_picked
WHERE CASE WHEN ((sqlaqueue_picked.id) IN (SELECT sqlaqueue_consumed.id
FROM sqlaqueue_consumed)) THEN true END ORDER BY sqlaqueue_picked.priority, sqlaqueue_picked.run_at, sqlaqueue_picked.id

UPDATE email SET status=%(status)s::VARCHAR, attempts=(coalesce(email.attempts, %(coalesce_1)s::INTEGER) + %(coalesce_2)s::INTEGER), finished_at=statement_timestamp() WHERE email.id = ANY (CAST(string_to_array(%(param_1)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status = 'pending' AND (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL RETURNING email.id

WITH sqlaqueue_other AS
(INSERT INTO sqlaqueue_message_email (id, priority, run_at) SELECT email.id AS id, email.priority AS priority, statement_timestamp() + %(param_1)s AS anon_1
FROM email
WHERE email.id = ANY (CAST(string_to_array(%(param_2)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status = 'pending' ON CONFLICT DO NOTHING),
sqlaqueue_changed AS
(UPDATE email SET status=%(param_3)s::VARCHAR, run_at=(statement_timestamp() + %(param_1)s), attempts=(coalesce(email.attempts, %(coalesce_1)s::INTEGER) + %(coalesce_2)s::INTEGER), finished_at=%(param_4)s::TIMESTAMP WITH TIME ZONE WHERE email.id = ANY (CAST(string_to_array(%(param_5)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status = 'pending' RETURNING email.id AS id)
 SELECT sqlaqueue_changed_keys.id
FROM (SELECT sqlaqueue_changed.id AS id
FROM sqlaqueue_changed) AS sqlaqueue_changed_keys
WHERE (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL

WITH sqlaqueue_other AS
(INSERT INTO sqlaqueue_message_email (id, priority, run_at) SELECT email.id AS id, email.priority AS priority, email.run_at AS run_at
FROM email
WHERE email.id = ANY (CAST(string_to_array(%(param_1)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status = 'pending' ON CONFLICT DO NOTHING),
sqlaqueue_changed AS
(UPDATE email SET status=%(param_2)s::VARCHAR, attempts=(coalesce(email.attempts, %(coalesce_1)s::INTEGER) + %(coalesce_2)s::INTEGER), finished_at=%(param_3)s::TIMESTAMP WITH TIME ZONE WHERE email.id = ANY (CAST(string_to_array(%(param_4)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status = 'pending' RETURNING email.id AS id)
 SELECT sqlaqueue_changed_keys.id
FROM (SELECT sqlaqueue_changed.id AS id
FROM sqlaqueue_changed) AS sqlaqueue_changed_keys
WHERE (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL

WITH sqlaqueue_wanted AS
(SELECT email.id AS id
FROM email
WHERE email.id = ANY (CAST(string_to_array(%(param_2)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status IN ('pending', 'processing')),
sqlaqueue_free AS
(SELECT email.id AS id
FROM email
WHERE email.id = ANY (CAST(string_to_array(%(param_2)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status = 'pending' ORDER BY email.id FOR NO KEY UPDATE OF email SKIP LOCKED),
sqlaqueue_other AS
(INSERT INTO sqlaqueue_control (queue, key, created_at) SELECT %(param_1)s::VARCHAR AS anon_1, jsonb_build_array(sqlaqueue_running.id) AS jsonb_build_array_1, statement_timestamp() AS statement_timestamp_1
FROM (SELECT sqlaqueue_wanted.id AS id
FROM sqlaqueue_wanted EXCEPT SELECT sqlaqueue_free.id AS id
FROM sqlaqueue_free) AS sqlaqueue_running ON CONFLICT (queue, key) DO UPDATE SET created_at = excluded.created_at RETURNING pg_notify(%(pg_notify_2)s::VARCHAR, %(pg_notify_3)s::VARCHAR) AS pg_notify_1),
sqlaqueue_changed AS
(UPDATE email SET status=%(param_3)s::VARCHAR, finished_at=statement_timestamp() FROM sqlaqueue_free WHERE email.id = sqlaqueue_free.id RETURNING email.id AS id)
 SELECT sqlaqueue_changed_keys.id
FROM (SELECT sqlaqueue_changed.id AS id
FROM sqlaqueue_changed) AS sqlaqueue_changed_keys
WHERE (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL

SELECT sqlaqueue_changed_keys.id
FROM (SELECT email.id AS id
FROM email
WHERE email.id = ANY (CAST(string_to_array(%(param_1)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status = 'pending') AS sqlaqueue_changed_keys
WHERE (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL

UPDATE email SET status=%(status)s::VARCHAR, run_at=statement_timestamp(), attempts=%(attempts)s::INTEGER, finished_at=%(finished_at)s::TIMESTAMP WITH TIME ZONE WHERE email.id = ANY (array((SELECT email.id
FROM email
WHERE email.id = ANY (CAST(string_to_array(%(param_1)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status IN ('completed', 'failed', 'cancelled') ORDER BY email.id FOR NO KEY UPDATE OF email))) AND (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL RETURNING email.id, true AS came_back

SELECT sqlaqueue_changed_keys.id
FROM (SELECT email.id AS id
FROM email
WHERE false) AS sqlaqueue_changed_keys
WHERE (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL

DELETE FROM email WHERE email.id = ANY (array((SELECT email.id
FROM email
WHERE email.status IN ('completed', 'failed', 'cancelled')
 LIMIT %(param_1)s::INTEGER FOR UPDATE OF email SKIP LOCKED))) AND (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL RETURNING email.id

WITH sqlaqueue_lost AS
(SELECT email.id AS id, email.priority AS priority, email.run_at AS run_at
FROM email
WHERE email.status = 'pending' AND NOT (EXISTS (SELECT *
FROM sqlaqueue_message_email
WHERE sqlaqueue_message_email.id = email.id)) AND true ORDER BY email.id FOR NO KEY UPDATE OF email SKIP LOCKED),
sqlaqueue_found AS
(INSERT INTO sqlaqueue_message_email (id, priority, run_at) SELECT sqlaqueue_lost.id AS id, sqlaqueue_lost.priority AS priority, sqlaqueue_lost.run_at AS run_at
FROM sqlaqueue_lost ON CONFLICT DO NOTHING RETURNING sqlaqueue_message_email.id AS id),
sqlaqueue_without_job AS
(SELECT sqlaqueue_message_email.id AS id
FROM sqlaqueue_message_email
WHERE NOT (EXISTS (SELECT *
FROM email
WHERE sqlaqueue_message_email.id = email.id)) AND NOT row_security_active($sqlaqueue$email$sqlaqueue$) AND true FOR UPDATE OF sqlaqueue_message_email SKIP LOCKED),
sqlaqueue_not_waiting AS
(SELECT sqlaqueue_message_email.id AS id
FROM sqlaqueue_message_email, email
WHERE sqlaqueue_message_email.id = email.id AND (email.status != 'pending' OR email.status IS NULL) AND true FOR UPDATE OF email, sqlaqueue_message_email SKIP LOCKED),
sqlaqueue_orphans AS
(SELECT sqlaqueue_without_job.id AS id
FROM sqlaqueue_without_job UNION ALL SELECT sqlaqueue_not_waiting.id AS id
FROM sqlaqueue_not_waiting),
sqlaqueue_consumed AS
(DELETE FROM sqlaqueue_message_email USING sqlaqueue_orphans WHERE sqlaqueue_message_email.id = sqlaqueue_orphans.id RETURNING sqlaqueue_message_email.id AS id)
 SELECT sqlaqueue_changed_keys.id
FROM (SELECT sqlaqueue_repaired.id AS id
FROM (SELECT sqlaqueue_found.id AS id
FROM sqlaqueue_found UNION ALL SELECT sqlaqueue_consumed.id AS id
FROM sqlaqueue_consumed) AS sqlaqueue_repaired) AS sqlaqueue_changed_keys
WHERE (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL

WITH sqlaqueue_wanted AS
(SELECT email.id AS id
FROM email
WHERE email.status IN ('pending', 'processing')),
sqlaqueue_free AS
(SELECT email.id AS id
FROM email
WHERE email.status = 'pending' ORDER BY email.id FOR NO KEY UPDATE OF email SKIP LOCKED),
sqlaqueue_other AS
(INSERT INTO sqlaqueue_control (queue, key, created_at) SELECT %(param_1)s::VARCHAR AS anon_1, jsonb_build_array(sqlaqueue_running.id) AS jsonb_build_array_1, statement_timestamp() AS statement_timestamp_1
FROM (SELECT sqlaqueue_wanted.id AS id
FROM sqlaqueue_wanted EXCEPT SELECT sqlaqueue_free.id AS id
FROM sqlaqueue_free) AS sqlaqueue_running ON CONFLICT (queue, key) DO UPDATE SET created_at = excluded.created_at RETURNING pg_notify(%(pg_notify_2)s::VARCHAR, %(pg_notify_3)s::VARCHAR) AS pg_notify_1),
sqlaqueue_changed AS
(UPDATE email SET status=%(param_2)s::VARCHAR, finished_at=statement_timestamp() FROM sqlaqueue_free WHERE email.id = sqlaqueue_free.id RETURNING email.id AS id)
 SELECT sqlaqueue_changed_keys.id
FROM (SELECT sqlaqueue_changed.id AS id
FROM sqlaqueue_changed) AS sqlaqueue_changed_keys
WHERE (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL

-- == consumer ==

DELETE FROM sqlaqueue_consumer WHERE sqlaqueue_consumer.id = %(id_1)s::VARCHAR RETURNING pg_notify(%(pg_notify_2)s::VARCHAR, %(pg_notify_3)s::VARCHAR) AS pg_notify_1

DELETE FROM sqlaqueue_consumer WHERE sqlaqueue_consumer.queue = %(queue_1)s::VARCHAR AND sqlaqueue_consumer.expires_at < statement_timestamp() - %(statement_timestamp_1)s

DELETE FROM sqlaqueue_control WHERE sqlaqueue_control.queue = %(queue_1)s::VARCHAR AND sqlaqueue_control.key != CAST('[]' AS JSONB) AND NOT (EXISTS (SELECT *
FROM sqlaqueue_consumer
WHERE sqlaqueue_consumer.queue = %(queue_2)s::VARCHAR AND sqlaqueue_consumer.expires_at > statement_timestamp() AND (sqlaqueue_control.key = jsonb_build_array('sqlaqueue_quiet', sqlaqueue_consumer.id) OR sqlaqueue_control.key = jsonb_build_array('sqlaqueue_stop', sqlaqueue_consumer.id)))) AND sqlaqueue_control.created_at < statement_timestamp() - %(statement_timestamp_1)s

DELETE FROM sqlaqueue_crash_journal WHERE sqlaqueue_crash_journal.id = %(id_1)s::UUID

DELETE FROM sqlaqueue_crash_journal WHERE sqlaqueue_crash_journal.queue = %(queue_1)s::VARCHAR AND sqlaqueue_crash_journal.created_at < statement_timestamp() - %(statement_timestamp_1)s

INSERT INTO email ("to") SELECT p0::VARCHAR FROM (VALUES (%(to__0)s::VARCHAR, 0), (%(to__1)s::VARCHAR, 1), (%(to__2)s::VARCHAR, 2), (%(to__3)s::VARCHAR, 3), (%(to__4)s::VARCHAR, 4), (%(to__5)s::VARCHAR, 5), (%(to__6)s::VARCHAR, 6), (%(to__7)s::VARCHAR, 7), (%(to__8)s::VARCHAR, 8), (%(to__9)s::VARCHAR, 9), (%(to__10)s::VARCHAR, 10), (%(to__11)s::VARCHAR, 11), (%(to__12)s::VARCHAR, 12), (%(to__13)s::VARCHAR, 13), (%(to__14)s::VARCHAR, 14), (%(to__15)s::VARCHAR, 15), (%(to__16)s::VARCHAR, 16), (%(to__17)s::VARCHAR, 17), (%(to__18)s::VARCHAR, 18), (%(to__19)s::VARCHAR, 19), (%(to__20)s::VARCHAR, 20), (%(to__21)s::VARCHAR, 21), (%(to__22)s::VARCHAR, 22), (%(to__23)s::VARCHAR, 23), (%(to__24)s::VARCHAR, 24), (%(to__25)s::VARCHAR, 25), (%(to__26)s::VARCHAR, 26), (%(to__27)s::VARCHAR, 27), (%(to__28)s::VARCHAR, 28), (%(to__29)s::VARCHAR, 29)) AS imp_sen(p0, sen_counter) ORDER BY sen_counter RETURNING email.id, email.status, email.priority, email.run_at, email.attempts, email.created_at, email.id AS id__1

LISTEN "sqlaqueue_email_email"

RELEASE SAVEPOINT sa_savepoint_1

RELEASE SAVEPOINT sa_savepoint_2

RELEASE SAVEPOINT sa_savepoint_3

SAVEPOINT sa_savepoint_1

SAVEPOINT sa_savepoint_2

SAVEPOINT sa_savepoint_3

SELECT 1

SELECT CAST(CAST(to_regclass($sqlaqueue$sqlaqueue_message_email$sqlaqueue$) AS OID) AS BIGINT) AS anon_1

SELECT CAST(pg_attribute.attname AS TEXT) AS attname, pg_attribute.attrelid = to_regclass($sqlaqueue$email$sqlaqueue$) AS anon_1, pg_attribute.attrelid = to_regclass($sqlaqueue$sqlaqueue_control$sqlaqueue$) AS anon_2, pg_attribute.attrelid = to_regclass($sqlaqueue$sqlaqueue_consumer$sqlaqueue$) AS anon_3, pg_attribute.attrelid = to_regclass($sqlaqueue$sqlaqueue_crash_journal$sqlaqueue$) AS anon_4, pg_attribute.attrelid = to_regclass($sqlaqueue$sqlaqueue_message_email$sqlaqueue$) AS anon_5
FROM pg_attribute
WHERE pg_attribute.attrelid IN (to_regclass($sqlaqueue$email$sqlaqueue$), to_regclass($sqlaqueue$sqlaqueue_control$sqlaqueue$), to_regclass($sqlaqueue$sqlaqueue_consumer$sqlaqueue$), to_regclass($sqlaqueue$sqlaqueue_crash_journal$sqlaqueue$), to_regclass($sqlaqueue$sqlaqueue_message_email$sqlaqueue$)) AND NOT pg_attribute.attisdropped

SELECT CAST(pg_class.relname AS TEXT) AS relname, CAST(pg_namespace.nspname AS TEXT) AS nspname, EXISTS (SELECT <n>
FROM pg_extension
WHERE pg_extension.extname = 'citus') AS anon_1
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = pg_class.relnamespace
WHERE pg_class.oid IN (to_regclass($sqlaqueue$email$sqlaqueue$), to_regclass($sqlaqueue$sqlaqueue_control$sqlaqueue$), to_regclass($sqlaqueue$sqlaqueue_consumer$sqlaqueue$), to_regclass($sqlaqueue$sqlaqueue_crash_journal$sqlaqueue$), to_regclass($sqlaqueue$sqlaqueue_message_email$sqlaqueue$))

SELECT CAST(pg_proc.proname AS TEXT) AS proname, obj_description(pg_proc.oid, %(obj_description_2)s::VARCHAR) AS obj_description_1
FROM pg_proc JOIN pg_class ON pg_class.relnamespace = pg_proc.pronamespace
WHERE pg_class.oid = to_regclass($sqlaqueue$email$sqlaqueue$) AND pg_proc.proname IN (%(proname_1_1)s::VARCHAR, %(proname_1_2)s::VARCHAR)

SELECT CAST(pg_trigger.tgname AS TEXT) AS tgname
FROM pg_trigger
WHERE pg_trigger.tgrelid = to_regclass($sqlaqueue$email$sqlaqueue$)

SELECT CAST(pg_trigger.tgname AS TEXT) AS tgname
FROM pg_trigger
WHERE pg_trigger.tgrelid = to_regclass($sqlaqueue$email$sqlaqueue$) AND CAST(pg_trigger.tgenabled AS TEXT) IN (%(param_1_1)s::VARCHAR, %(param_1_2)s::VARCHAR)

SELECT c.oid::bigint AS table_id, i.relname::text AS name,
           x.indexrelid::regclass::text AS qualified, x.indisvalid AS valid, x.indisunique AS is_unique,
           pg_get_expr(x.indpred, x.indrelid) AS predicate, pg_get_indexdef(x.indexrelid) AS definition,
           m.amname::text AS method,
           ARRAY(SELECT pg_get_indexdef(x.indexrelid, k, true) FROM generate_series(1, x.indnkeyatts) AS k) AS elements,
           EXISTS (SELECT FROM unnest(x.indoption::int2[]) AS o WHERE o <> 0) AS is_reordered,
           EXISTS (SELECT FROM pg_stat_progress_create_index AS p WHERE p.index_relid = x.indexrelid) AS building
    FROM pg_index AS x
    JOIN pg_class AS c ON c.oid = x.indrelid
    JOIN pg_class AS i ON i.oid = x.indexrelid
    JOIN pg_am AS m ON m.oid = i.relam
    WHERE x.indrelid = ANY (CAST(%(tables)s::BIGINT[] AS oid[]))
    ORDER BY i.relname

SELECT email.id
FROM email
WHERE true AND (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL ORDER BY email.id
 LIMIT %(param_1)s::INTEGER OFFSET %(param_2)s::INTEGER

SELECT obj_description(to_regclass($sqlaqueue$sqlaqueue_control$sqlaqueue$), 'pg_class') AS obj_description_1, obj_description(to_regclass($sqlaqueue$sqlaqueue_consumer$sqlaqueue$), 'pg_class') AS obj_description_2, obj_description(to_regclass($sqlaqueue$sqlaqueue_crash_journal$sqlaqueue$), 'pg_class') AS obj_description_3, obj_description(to_regclass($sqlaqueue$sqlaqueue_message_email$sqlaqueue$), 'pg_class') AS obj_description_4

SELECT quote_ident(CAST(current_user AS TEXT)) AS quote_ident_1, has_function_privilege('pg_catalog.pg_notify(text,text)', 'EXECUTE') AS has_function_privilege_1, has_table_privilege(to_regclass($sqlaqueue$email$sqlaqueue$), 'SELECT') AS has_table_privilege_1, has_table_privilege(to_regclass($sqlaqueue$email$sqlaqueue$), 'UPDATE') AS has_table_privilege_2, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_control$sqlaqueue$), 'SELECT') AS has_table_privilege_3, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_control$sqlaqueue$), 'UPDATE') AS has_table_privilege_4, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_control$sqlaqueue$), 'DELETE') AS has_table_privilege_5, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_consumer$sqlaqueue$), 'SELECT') AS has_table_privilege_6, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_consumer$sqlaqueue$), 'INSERT') AS has_table_privilege_7, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_consumer$sqlaqueue$), 'UPDATE') AS has_table_privilege_8, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_consumer$sqlaqueue$), 'DELETE') AS has_table_privilege_9, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_crash_journal$sqlaqueue$), 'SELECT') AS has_table_privilege_10, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_crash_journal$sqlaqueue$), 'INSERT') AS has_table_privilege_11, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_crash_journal$sqlaqueue$), 'UPDATE') AS has_table_privilege_12, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_crash_journal$sqlaqueue$), 'DELETE') AS has_table_privilege_13, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_message_email$sqlaqueue$), 'SELECT') AS has_table_privilege_14, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_message_email$sqlaqueue$), 'INSERT') AS has_table_privilege_15, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_message_email$sqlaqueue$), 'UPDATE') AS has_table_privilege_16, has_table_privilege(to_regclass($sqlaqueue$sqlaqueue_message_email$sqlaqueue$), 'DELETE') AS has_table_privilege_17

SELECT quote_ident(CAST(current_user AS TEXT)) AS quote_ident_1, row_security_active($sqlaqueue$email$sqlaqueue$) AS row_security_active_1, row_security_active($sqlaqueue$sqlaqueue_control$sqlaqueue$) AS row_security_active_2, row_security_active($sqlaqueue$sqlaqueue_consumer$sqlaqueue$) AS row_security_active_3, row_security_active($sqlaqueue$sqlaqueue_crash_journal$sqlaqueue$) AS row_security_active_4, row_security_active($sqlaqueue$sqlaqueue_message_email$sqlaqueue$) AS row_security_active_5

SELECT quote_ident(pg_namespace.nspname) AS quote_ident_1, quote_ident(CAST(current_user AS TEXT)) AS quote_ident_2
FROM pg_namespace
WHERE (parse_ident($sqlaqueue$email$sqlaqueue$))[%(parse_ident_1)s::INTEGER] IS NOT NULL AND pg_namespace.nspname = (parse_ident($sqlaqueue$email$sqlaqueue$))[%(parse_ident_2)s::INTEGER] AND NOT has_schema_privilege(pg_namespace.oid, 'USAGE')

SELECT set_config(%(set_config_2)s::VARCHAR, %(set_config_3)s::VARCHAR, true) AS set_config_1, set_config(%(set_config_5)s::VARCHAR, %(set_config_6)s::VARCHAR, true) AS set_config_4, set_config(%(set_config_8)s::VARCHAR, %(set_config_9)s::VARCHAR, true) AS set_config_7

SELECT to_regclass($sqlaqueue$email$sqlaqueue$) AS anon_1, to_regclass($sqlaqueue$sqlaqueue_control$sqlaqueue$) AS anon_2, to_regclass($sqlaqueue$sqlaqueue_consumer$sqlaqueue$) AS anon_3, to_regclass($sqlaqueue$sqlaqueue_crash_journal$sqlaqueue$) AS anon_4, to_regclass($sqlaqueue$sqlaqueue_message_email$sqlaqueue$) AS anon_5

SELECT txid_current() AS txid_current_1, current_setting(%(current_setting_2)s::VARCHAR) AS current_setting_1

UPDATE email SET status=%(status)s::VARCHAR, attempts=(coalesce(email.attempts, %(coalesce_1)s::INTEGER) + %(coalesce_2)s::INTEGER), finished_at=statement_timestamp() WHERE email.id = %(sqlaqueue_key_0)s::INTEGER AND email.status = 'pending' AND (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL

UPDATE email SET status=%(status)s::VARCHAR, attempts=(coalesce(email.attempts, %(coalesce_1)s::INTEGER) + %(coalesce_2)s::INTEGER), last_error=%(last_error)s::VARCHAR, finished_at=statement_timestamp() WHERE email.id = ANY (CAST(string_to_array(%(param_1)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status = 'pending' AND (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL RETURNING email.id

WITH RECURSIVE sqlaqueue_level(level, first) AS
((SELECT sqlaqueue_message_email.priority AS level, sqlaqueue_message_email.run_at AS first
FROM sqlaqueue_message_email ORDER BY sqlaqueue_message_email.priority, sqlaqueue_message_email.run_at
 LIMIT <n>) UNION ALL SELECT sqlaqueue_above.level AS level, sqlaqueue_above.first AS first
FROM sqlaqueue_level JOIN LATERAL (SELECT sqlaqueue_message_email.priority AS level, sqlaqueue_message_email.run_at AS first
FROM sqlaqueue_message_email
WHERE sqlaqueue_message_email.priority > sqlaqueue_level.level ORDER BY sqlaqueue_message_email.priority, sqlaqueue_message_email.run_at
 LIMIT <n>) AS sqlaqueue_above ON true),
sqlaqueue_picked AS
(SELECT sqlaqueue_found.id AS id, sqlaqueue_found."to" AS "to", sqlaqueue_found.status AS status, sqlaqueue_found.priority AS priority, sqlaqueue_found.run_at AS run_at, sqlaqueue_found.attempts AS attempts, sqlaqueue_found.max_attempts AS max_attempts, sqlaqueue_found.last_error AS last_error, sqlaqueue_found.created_at AS created_at, sqlaqueue_found.finished_at AS finished_at
FROM (SELECT sqlaqueue_each.id AS id, sqlaqueue_each."to" AS "to", sqlaqueue_each.status AS status, sqlaqueue_each.priority AS priority, sqlaqueue_each.run_at AS run_at, sqlaqueue_each.attempts AS attempts, sqlaqueue_each.max_attempts AS max_attempts, sqlaqueue_each.last_error AS last_error, sqlaqueue_each.created_at AS created_at, sqlaqueue_each.finished_at AS finished_at, 1 AS sqlaqueue_one
FROM sqlaqueue_level JOIN LATERAL (SELECT email.id AS id, email."to" AS "to", email.status AS status, email.priority AS priority, email.run_at AS run_at, email.attempts AS attempts, email.max_attempts AS max_attempts, email.last_error AS last_error, email.created_at AS created_at, email.finished_at AS finished_at
FROM email, sqlaqueue_message_email, generate_series(1, (SELECT <n>)) AS sqlaqueue_thousand
WHERE NOT (email.id = ANY (CAST(string_to_array(%(sqlaqueue_except)s::VARCHAR, ',', 'NULL') AS INTEGER[]))) AND NOT (EXISTS (SELECT <n>
FROM sqlaqueue_control
WHERE sqlaqueue_control.queue = %(queue_1)s::VARCHAR AND sqlaqueue_control.key = CAST('[]' AS JSONB))) AND (SELECT count(*) AS count_1
FROM generate_series(1, least(1 + <n> / 16, 100)) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL AND sqlaqueue_message_email.id = email.id AND CASE WHEN (email.status = 'pending') THEN true END AND (sqlaqueue_message_email.priority, sqlaqueue_message_email.run_at) >= (sqlaqueue_level.level, sqlaqueue_level.first) AND (sqlaqueue_message_email.priority, sqlaqueue_message_email.run_at) <= (sqlaqueue_level.level, statement_timestamp()) AND sqlaqueue_thousand.sqlaqueue_thousand IS NOT NULL ORDER BY sqlaqueue_message_email.priority, sqlaqueue_message_email.run_at, sqlaqueue_message_email.id
 LIMIT (SELECT <n> AS anon_1) FOR NO KEY UPDATE OF email, sqlaqueue_message_email SKIP LOCKED) AS sqlaqueue_each ON sqlaqueue_level.first <= statement_timestamp()
 LIMIT <n>) AS sqlaqueue_found
WHERE sqlaqueue_found.sqlaqueue_one = 1),
sqlaqueue_consumed AS
(DELETE FROM sqlaqueue_message_email WHERE sqlaqueue_message_email.id = ANY (array((SELECT sqlaqueue_picked.id
FROM sqlaqueue_picked))) RETURNING sqlaqueue_message_email.id AS id)
 SELECT sqlaqueue_picked.id, sqlaqueue_picked."to", sqlaqueue_picked.status, sqlaqueue_picked.priority, sqlaqueue_picked.run_at, sqlaqueue_picked.attempts, sqlaqueue_picked.max_attempts, sqlaqueue_picked.last_error, sqlaqueue_picked.created_at, sqlaqueue_picked.finished_at
FROM sqlaqueue_picked
WHERE CASE WHEN ((sqlaqueue_picked.id) IN (SELECT sqlaqueue_consumed.id
FROM sqlaqueue_consumed)) THEN true END ORDER BY sqlaqueue_picked.priority, sqlaqueue_picked.run_at, sqlaqueue_picked.id

WITH RECURSIVE sqlaqueue_levels(level) AS
(SELECT min(sqlaqueue_message_email.priority) AS level
FROM sqlaqueue_message_email UNION ALL SELECT (SELECT min(sqlaqueue_message_email.priority) AS level
FROM sqlaqueue_message_email
WHERE sqlaqueue_message_email.priority > sqlaqueue_levels.level) AS anon_1
FROM sqlaqueue_levels
WHERE sqlaqueue_levels.level IS NOT NULL)
 SELECT sqlaqueue_each.moment
FROM sqlaqueue_levels JOIN LATERAL (SELECT EXTRACT(epoch FROM CAST(sqlaqueue_message_email.run_at AS TIMESTAMP WITH TIME ZONE)) AS moment
FROM sqlaqueue_message_email
WHERE sqlaqueue_message_email.run_at > statement_timestamp() AND sqlaqueue_message_email.priority = sqlaqueue_levels.level ORDER BY sqlaqueue_message_email.run_at
 LIMIT %(param_1)s::INTEGER) AS sqlaqueue_each ON true ORDER BY sqlaqueue_each.moment
 LIMIT %(param_2)s::INTEGER

WITH sqlaqueue_asked AS
(SELECT sqlaqueue_control.queue AS sqlaqueue_queue, sqlaqueue_control.key AS sqlaqueue_key, sqlaqueue_mine.id AS id
FROM sqlaqueue_control, (SELECT email.id AS id
FROM email
WHERE email.id = ANY (CAST(string_to_array(%(param_1)s::VARCHAR, ',', 'NULL') AS INTEGER[]))) AS sqlaqueue_mine
WHERE sqlaqueue_control.queue = %(queue_1)s::VARCHAR AND sqlaqueue_control.key = jsonb_build_array(sqlaqueue_mine.id) FOR UPDATE OF sqlaqueue_control SKIP LOCKED)
 DELETE FROM sqlaqueue_control USING sqlaqueue_asked WHERE sqlaqueue_control.queue = sqlaqueue_asked.sqlaqueue_queue AND sqlaqueue_control.key = sqlaqueue_asked.sqlaqueue_key RETURNING sqlaqueue_asked.id, EXTRACT(epoch FROM clock_timestamp() - sqlaqueue_control.created_at) AS anon_1

WITH sqlaqueue_ended AS
(UPDATE email SET status=%(param_1)s::VARCHAR, attempts=(coalesce(email.attempts, %(coalesce_1)s::INTEGER) + %(coalesce_2)s::INTEGER), finished_at=statement_timestamp() WHERE email.id = ANY (CAST(string_to_array(%(sqlaqueue_keys)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status = 'pending' AND (SELECT count(*) AS count_2
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL RETURNING email.id AS id)
 SELECT (SELECT count(*) AS count_1
FROM sqlaqueue_ended) AS anon_1, sqlaqueue_ended.id
FROM (SELECT %(param_2)s::INTEGER AS anon_2) AS sqlaqueue_one LEFT OUTER JOIN sqlaqueue_ended ON (SELECT count(*) AS count_1
FROM sqlaqueue_ended) != %(sqlaqueue_expected)s::BIGINT

WITH sqlaqueue_entered AS
(INSERT INTO sqlaqueue_crash_journal (id, queue, keys, starts, worker) VALUES (%(its_id)s::UUID, %(param_1)s::VARCHAR, CAST(%(its_keys)s::VARCHAR AS JSONB), %(its_starts)s::INTEGER, %(its_worker)s::VARCHAR) RETURNING set_config(%(set_config_2)s::VARCHAR, %(set_config_3)s::VARCHAR, true) AS set_config_1)
 SELECT sqlaqueue_crash_journal.keys, sqlaqueue_crash_journal.starts
FROM sqlaqueue_crash_journal
WHERE sqlaqueue_crash_journal.queue = %(queue_1)s::VARCHAR AND (EXISTS (SELECT *
FROM jsonb_array_elements_text(sqlaqueue_crash_journal.keys) AS sqlaqueue_its
WHERE CASE WHEN (sqlaqueue_its.name IN (SELECT jsonb_array_elements_text(CAST(%(its_keys)s::VARCHAR AS JSONB)) AS jsonb_array_elements_text_1)) THEN true END))

WITH sqlaqueue_heartbeat AS
(INSERT INTO sqlaqueue_consumer (id, queue, name, host, pid, version, listening, running, claimed, unclaimable, heartbeat_at, expires_at) VALUES (%(param_1)s::VARCHAR, %(param_2)s::VARCHAR, %(param_3)s::VARCHAR, %(param_4)s::VARCHAR, %(param_5)s::INTEGER, %(param_6)s::VARCHAR, %(param_7)s, CAST(%(param_8)s::VARCHAR AS JSONB), %(param_9)s::INTEGER, CAST(%(param_10)s::VARCHAR AS JSONB), statement_timestamp(), (statement_timestamp() + %(param_11)s)) ON CONFLICT (id) DO UPDATE SET listening = excluded.listening, running = excluded.running, claimed = excluded.claimed, unclaimable = excluded.unclaimable, heartbeat_at = excluded.heartbeat_at, expires_at = excluded.expires_at RETURNING pg_notify(%(pg_notify_2)s::VARCHAR, %(pg_notify_3)s::VARCHAR) AS pg_notify_1)
 SELECT coalesce(array_agg(sqlaqueue_consumer.id), CAST(%(param_12)s::TEXT[] AS TEXT[])) AS coalesce_1, EXTRACT(epoch FROM clock_timestamp()) AS anon_1, EXISTS (SELECT *
FROM sqlaqueue_control
WHERE sqlaqueue_control.queue = %(queue_1)s::VARCHAR AND sqlaqueue_control.key = jsonb_build_array('sqlaqueue_quiet', %(param_13)s::VARCHAR)) AS anon_2, EXISTS (SELECT *
FROM sqlaqueue_control
WHERE sqlaqueue_control.queue = %(queue_2)s::VARCHAR AND sqlaqueue_control.key = jsonb_build_array('sqlaqueue_stop', %(param_14)s::VARCHAR)) AS anon_3
FROM sqlaqueue_consumer
WHERE sqlaqueue_consumer.queue = %(queue_3)s::VARCHAR AND sqlaqueue_consumer.listening AND sqlaqueue_consumer.expires_at > statement_timestamp()

WITH sqlaqueue_lost AS
(SELECT email.id AS id, email.priority AS priority, email.run_at AS run_at
FROM email
WHERE email.status = 'pending' AND NOT (EXISTS (SELECT *
FROM sqlaqueue_message_email
WHERE sqlaqueue_message_email.id = email.id)) AND true ORDER BY email.id FOR NO KEY UPDATE OF email SKIP LOCKED),
sqlaqueue_found AS
(INSERT INTO sqlaqueue_message_email (id, priority, run_at) SELECT sqlaqueue_lost.id AS id, sqlaqueue_lost.priority AS priority, sqlaqueue_lost.run_at AS run_at
FROM sqlaqueue_lost ON CONFLICT DO NOTHING RETURNING sqlaqueue_message_email.id AS id),
sqlaqueue_without_job AS
(SELECT sqlaqueue_message_email.id AS id
FROM sqlaqueue_message_email
WHERE NOT (EXISTS (SELECT *
FROM email
WHERE sqlaqueue_message_email.id = email.id)) AND NOT row_security_active($sqlaqueue$email$sqlaqueue$) AND true FOR UPDATE OF sqlaqueue_message_email SKIP LOCKED),
sqlaqueue_not_waiting AS
(SELECT sqlaqueue_message_email.id AS id
FROM sqlaqueue_message_email, email
WHERE sqlaqueue_message_email.id = email.id AND (email.status != 'pending' OR email.status IS NULL) AND true FOR UPDATE OF email, sqlaqueue_message_email SKIP LOCKED),
sqlaqueue_orphans AS
(SELECT sqlaqueue_without_job.id AS id
FROM sqlaqueue_without_job UNION ALL SELECT sqlaqueue_not_waiting.id AS id
FROM sqlaqueue_not_waiting),
sqlaqueue_consumed AS
(DELETE FROM sqlaqueue_message_email USING sqlaqueue_orphans WHERE sqlaqueue_message_email.id = sqlaqueue_orphans.id RETURNING sqlaqueue_message_email.id AS id)
 SELECT sqlaqueue_changed_keys.id
FROM (SELECT sqlaqueue_repaired.id AS id
FROM (SELECT sqlaqueue_found.id AS id
FROM sqlaqueue_found UNION ALL SELECT sqlaqueue_consumed.id AS id
FROM sqlaqueue_consumed) AS sqlaqueue_repaired) AS sqlaqueue_changed_keys
WHERE (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL

WITH sqlaqueue_other AS
(INSERT INTO sqlaqueue_message_email (id, priority, run_at) SELECT email.id AS id, email.priority AS priority, statement_timestamp() + %(param_1)s AS anon_1
FROM email
WHERE email.id = ANY (CAST(string_to_array(%(param_2)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status = 'pending' ON CONFLICT DO NOTHING),
sqlaqueue_changed AS
(UPDATE email SET status=%(param_3)s::VARCHAR, run_at=(statement_timestamp() + %(param_1)s), attempts=(coalesce(email.attempts, %(coalesce_1)s::INTEGER) + %(coalesce_2)s::INTEGER), finished_at=%(param_4)s::TIMESTAMP WITH TIME ZONE WHERE email.id = ANY (CAST(string_to_array(%(param_5)s::VARCHAR, ',', 'NULL') AS INTEGER[])) AND email.status = 'pending' RETURNING email.id AS id)
 SELECT sqlaqueue_changed_keys.id
FROM (SELECT sqlaqueue_changed.id AS id
FROM sqlaqueue_changed) AS sqlaqueue_changed_keys
WHERE (SELECT count(*) AS count_1
FROM generate_series(1, <n>) AS sqlaqueue_each_row JOIN generate_series(1, %(sqlaqueue_just_one)s::INTEGER) AS sqlaqueue_once ON true) IS NOT NULL
