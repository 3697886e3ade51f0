SELECT pg_catalog.set_config('search_path', '', false);
CREATE FUNCTION public.sqlaqueue_capacity_full_update_customer(sqlaqueue_claim text, sqlaqueue_number integer, sqlaqueue_key bigint, sqlaqueue_most integer, sqlaqueue_lock boolean) RETURNS integer
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $_$
DECLARE
  sqlaqueue_free integer;
  sqlaqueue_salted text := ',' || pg_catalog.hashint8extended(sqlaqueue_key, sqlaqueue_number) || ',';
  sqlaqueue_name text := 'sqlaqueue.claim_' || (sqlaqueue_key & 63);
  sqlaqueue_record text := pg_catalog.current_setting(sqlaqueue_name, true);
  sqlaqueue_room boolean;
  sqlaqueue_full text := '!' || sqlaqueue_most || ' ' || pg_catalog.btrim(sqlaqueue_salted, ',') || '!';
BEGIN
  IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'sqlaqueue: a claim of a queue with limits, rates or an order needs READ COMMITTED; '
      'this transaction is %', pg_catalog.upper(pg_catalog.current_setting('transaction_isolation'))
      USING ERRCODE = 'feature_not_supported';
  END IF;
  IF pg_catalog.starts_with(sqlaqueue_record, sqlaqueue_claim) IS NOT TRUE THEN
    sqlaqueue_record := sqlaqueue_claim;
  END IF;
  IF pg_catalog.strpos(sqlaqueue_record, sqlaqueue_full) > 0 THEN
    RETURN 0;
  END IF;
  sqlaqueue_room := pg_catalog.current_setting('sqlaqueue.room', true) IS NOT DISTINCT FROM sqlaqueue_claim;
  IF sqlaqueue_room AND NOT sqlaqueue_lock THEN
    RETURN 1;
  END IF;
  FOR sqlaqueue_round IN 1 .. 2 LOOP
    IF NOT sqlaqueue_room OR sqlaqueue_round = 2 THEN
    SELECT sqlaqueue_most - pg_catalog.count(*) INTO sqlaqueue_free FROM (
      SELECT FROM full_update WHERE (
CASE
    WHEN status = 'processing' THEN hash_record_extended(row(customer), '0'::bigint)
    ELSE NULL::bigint
END) = sqlaqueue_key LIMIT greatest(sqlaqueue_most, 0)
    ) AS sqlaqueue_counted;
    sqlaqueue_free := sqlaqueue_free - (pg_catalog.length(sqlaqueue_record) - pg_catalog.length(
      pg_catalog.replace(sqlaqueue_record, sqlaqueue_salted, ''))) / pg_catalog.length(sqlaqueue_salted);
    IF sqlaqueue_free <= 0 THEN
      PERFORM pg_catalog.set_config(sqlaqueue_name, sqlaqueue_record || sqlaqueue_full, true);
      IF sqlaqueue_round = 2 THEN
        PERFORM pg_catalog.set_config('sqlaqueue.room', '', true);
      END IF;
      RETURN 0;
    END IF;
    END IF;
    EXIT WHEN NOT sqlaqueue_lock OR sqlaqueue_round = 2;
    IF NOT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashint8extended(sqlaqueue_key, pg_catalog.hashtextextended('limit customer', $sqlaqueue_name$full_update$sqlaqueue_name$::regclass::oid::bigint))) THEN
      PERFORM pg_catalog.set_config('sqlaqueue.contended', 'on', true);
      RETURN 0;
    END IF;
  END LOOP;
  IF sqlaqueue_lock AND NOT sqlaqueue_room THEN
    PERFORM pg_catalog.set_config('sqlaqueue.room', sqlaqueue_claim, true);
  END IF;
  RETURN sqlaqueue_free;
END
$_$;
COMMENT ON FUNCTION public.sqlaqueue_capacity_full_update_customer(sqlaqueue_claim text, sqlaqueue_number integer, sqlaqueue_key bigint, sqlaqueue_most integer, sqlaqueue_lock boolean) IS 'sqlaqueue, version 2';
CREATE FUNCTION public.sqlaqueue_freed_full_delete() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
  -- An error, as of a server that has no room for another lock, must not fail the statement.
  BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock_shared(1483359697, -43516197) THEN
      RETURN NULL;
    END IF;
  EXCEPTION WHEN OTHERS THEN
  END;
  PERFORM pg_catalog.pg_notify('sqlaqueue_full_delete_full_delete',
    pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(), 1, 0));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_freed_full_delete() IS 'sqlaqueue, version 2';
CREATE FUNCTION public.sqlaqueue_freed_full_update() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
  -- An error, as of a server that has no room for another lock, must not fail the statement.
  BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock_shared(467505051, -1007178020) THEN
      RETURN NULL;
    END IF;
  EXCEPTION WHEN OTHERS THEN
  END;
  PERFORM pg_catalog.pg_notify('sqlaqueue_full_update_full_update',
    pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(), 1, 0));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_freed_full_update() IS 'sqlaqueue, version 2';
CREATE FUNCTION public.sqlaqueue_freed_ordered() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
  -- An error, as of a server that has no room for another lock, must not fail the statement.
  BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock_shared(1028006947, -348361458) THEN
      RETURN NULL;
    END IF;
  EXCEPTION WHEN OTHERS THEN
  END;
  PERFORM pg_catalog.pg_notify('sqlaqueue_ordered_ordered',
    pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(), 1, 0));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_freed_ordered() IS 'sqlaqueue, version 2';
CREATE FUNCTION public.sqlaqueue_head_ordered_customer(sqlaqueue_claim text, sqlaqueue_number integer, sqlaqueue_key bigint, sqlaqueue_job text, sqlaqueue_lock boolean) RETURNS text
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $_$
DECLARE
  sqlaqueue_first text;
  sqlaqueue_salted text := ',' || pg_catalog.hashint8extended(sqlaqueue_key, sqlaqueue_number) || ',';
  sqlaqueue_name text := 'sqlaqueue.claim_' || (sqlaqueue_key & 63);
  sqlaqueue_record text := pg_catalog.current_setting(sqlaqueue_name, true);
  sqlaqueue_room boolean;
BEGIN
  IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'sqlaqueue: a claim of a queue with limits, rates or an order needs READ COMMITTED; '
      'this transaction is %', pg_catalog.upper(pg_catalog.current_setting('transaction_isolation'))
      USING ERRCODE = 'feature_not_supported';
  END IF;
  IF pg_catalog.starts_with(sqlaqueue_record, sqlaqueue_claim) IS NOT TRUE THEN
    sqlaqueue_record := sqlaqueue_claim;
  END IF;
  sqlaqueue_room := pg_catalog.current_setting('sqlaqueue.room', true) IS NOT DISTINCT FROM sqlaqueue_claim;
  IF sqlaqueue_room AND NOT sqlaqueue_lock THEN
    RETURN sqlaqueue_job;
  END IF;
  FOR sqlaqueue_round IN 1 .. 2 LOOP
    IF NOT sqlaqueue_room OR sqlaqueue_round = 2 THEN
    IF pg_catalog.strpos(sqlaqueue_record, sqlaqueue_salted) > 0
      OR EXISTS (SELECT FROM ordered WHERE (
CASE
    WHEN status = 'processing' THEN hash_record_extended(row(customer), '0'::bigint)
    ELSE NULL::bigint
END) = sqlaqueue_key) THEN
      IF sqlaqueue_round = 2 THEN
        PERFORM pg_catalog.set_config('sqlaqueue.room', '', true);
      END IF;
      RETURN NULL;
    END IF;
    SELECT CASE WHEN status = 'pending' THEN pg_catalog.jsonb_build_array(id)::text END INTO sqlaqueue_first FROM ordered WHERE hash_record_extended(row(customer), '0'::bigint) = sqlaqueue_key AND (status = 'processing' OR status = 'failed' OR (status = 'pending' AND (started_at IS NOT NULL OR run_at IS NULL OR run_at <= statement_timestamp()))) ORDER BY id LIMIT 1;
    IF sqlaqueue_first IS DISTINCT FROM sqlaqueue_job THEN
      IF sqlaqueue_round = 2 THEN
        PERFORM pg_catalog.set_config('sqlaqueue.room', '', true);
      END IF;
      RETURN NULL;
    END IF;
    END IF;
    EXIT WHEN NOT sqlaqueue_lock OR sqlaqueue_round = 2;
    IF NOT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashint8extended(sqlaqueue_key, pg_catalog.hashtextextended('order customer', $sqlaqueue_name$ordered$sqlaqueue_name$::regclass::oid::bigint))) THEN
      PERFORM pg_catalog.set_config('sqlaqueue.contended', 'on', true);
      RETURN NULL;
    END IF;
  END LOOP;
  IF sqlaqueue_lock AND NOT sqlaqueue_room THEN
    PERFORM pg_catalog.set_config('sqlaqueue.room', sqlaqueue_claim, true);
  END IF;
  RETURN sqlaqueue_first;
END
$_$;
COMMENT ON FUNCTION public.sqlaqueue_head_ordered_customer(sqlaqueue_claim text, sqlaqueue_number integer, sqlaqueue_key bigint, sqlaqueue_job text, sqlaqueue_lock boolean) IS 'sqlaqueue, version 2';
CREATE FUNCTION public.sqlaqueue_hold_full_delete(sqlaqueue_claim text, sqlaqueue_row tid, sqlaqueue_part oid, sqlaqueue_message tid, sqlaqueue_job text, sqlaqueue_order bigint, sqlaqueue_number integer, sqlaqueue_limits text[], sqlaqueue_keys bigint[], sqlaqueue_most integer[], sqlaqueue_changing boolean[]) RETURNS boolean
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $_$
DECLARE
  sqlaqueue_name text;
  sqlaqueue_record text;
  sqlaqueue_salted text;
  sqlaqueue_first text;
  sqlaqueue_slot bigint;
  sqlaqueue_taken boolean;
  sqlaqueue_full text;
  sqlaqueue_with_full text;
  sqlaqueue_contended boolean := false;
BEGIN
  IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'sqlaqueue: a claim of a queue with limits, rates or an order needs READ COMMITTED; '
      'this transaction is %', pg_catalog.upper(pg_catalog.current_setting('transaction_isolation'))
      USING ERRCODE = 'feature_not_supported';
  END IF;
  sqlaqueue_limits := ARRAY[''] || sqlaqueue_limits;
  sqlaqueue_keys := ARRAY[sqlaqueue_order] || sqlaqueue_keys;
  sqlaqueue_most := ARRAY[1] || sqlaqueue_most;
  sqlaqueue_changing := ARRAY[false] || sqlaqueue_changing;
  FOR i IN 1 .. pg_catalog.cardinality(sqlaqueue_keys) LOOP
    CONTINUE WHEN sqlaqueue_keys[i] IS NULL;
    sqlaqueue_name := 'sqlaqueue.claim_' || (sqlaqueue_keys[i] & 63);
    sqlaqueue_record := pg_catalog.current_setting(sqlaqueue_name, true);
    IF pg_catalog.starts_with(sqlaqueue_record, sqlaqueue_claim) IS NOT TRUE THEN
      sqlaqueue_record := sqlaqueue_claim;
    END IF;
    sqlaqueue_salted := ',' || pg_catalog.hashint8extended(
      sqlaqueue_keys[i], CASE i WHEN 1 THEN 0 ELSE sqlaqueue_number + i - 2 END) || ',';
    -- Jobs of a key may have different limits.
    sqlaqueue_full := '!' || sqlaqueue_most[i] || ' ' || pg_catalog.btrim(sqlaqueue_salted, ',') || '!';
    -- One job of an order for each claim: the next one may begin when this one has ended.
    IF pg_catalog.strpos(sqlaqueue_record, sqlaqueue_full) > 0
      OR i = 1 AND pg_catalog.strpos(sqlaqueue_record, sqlaqueue_salted) > 0 THEN
      RETURN false;
    END IF;
  END LOOP;
  BEGIN
    FOR i IN 1 .. pg_catalog.cardinality(sqlaqueue_keys) LOOP
      CONTINUE WHEN sqlaqueue_keys[i] IS NULL OR sqlaqueue_most[i] IS NULL;
      sqlaqueue_name := 'sqlaqueue.claim_' || (sqlaqueue_keys[i] & 63);
      sqlaqueue_record := pg_catalog.current_setting(sqlaqueue_name, true);
      IF pg_catalog.starts_with(sqlaqueue_record, sqlaqueue_claim) IS NOT TRUE THEN
        sqlaqueue_record := sqlaqueue_claim;
      END IF;
      sqlaqueue_salted := ',' || pg_catalog.hashint8extended(
        sqlaqueue_keys[i], CASE i WHEN 1 THEN 0 ELSE sqlaqueue_number + i - 2 END) || ',';
      -- Jobs of a key may have different limits.
      sqlaqueue_full := '!' || sqlaqueue_most[i] || ' ' || pg_catalog.btrim(sqlaqueue_salted, ',') || '!';
      sqlaqueue_taken := pg_catalog.strpos(sqlaqueue_record, sqlaqueue_salted) > 0;
      CONTINUE WHEN sqlaqueue_taken AND NOT sqlaqueue_changing[i];
      sqlaqueue_slot := pg_catalog.hashint8extended(sqlaqueue_keys[i], pg_catalog.hashtextextended(
        sqlaqueue_limits[i], $sqlaqueue_name$full_delete$sqlaqueue_name$::regclass::oid::bigint)) & -(1::bigint << 20);
      FOR sqlaqueue_try IN 0 .. least(sqlaqueue_most[i], 1 << 20) - 1 LOOP
        EXIT WHEN sqlaqueue_taken;
        sqlaqueue_taken := pg_catalog.pg_try_advisory_xact_lock(sqlaqueue_slot | sqlaqueue_try);
      END LOOP;
      IF sqlaqueue_taken AND sqlaqueue_changing[i] THEN
        SELECT pg_catalog.count(DISTINCT l.virtualtransaction) <= sqlaqueue_most[i] INTO sqlaqueue_taken
          FROM pg_catalog.pg_locks AS l
          WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
            AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d
              WHERE d.datname = pg_catalog.current_database())
            AND (l.classid::bigint << 32 | l.objid::bigint) & -(1::bigint << 20) = sqlaqueue_slot;
        -- Two claims may have counted each other's slot.
        sqlaqueue_contended := NOT sqlaqueue_taken;
      END IF;
      IF NOT sqlaqueue_taken THEN
        sqlaqueue_with_full := sqlaqueue_record || sqlaqueue_full;
        RAISE SQLSTATE 'SQ001';
      END IF;
    END LOOP;
    -- The version of the row that the claim has read: if there is a newer one, the next claim reads it.
    PERFORM FROM full_delete AS j, sqlaqueue_message_full_delete AS m WHERE j.ctid = sqlaqueue_row AND j.tableoid = sqlaqueue_part AND m.ctid = sqlaqueue_message FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
      RAISE SQLSTATE 'SQ001';
    END IF;
    RETURN true;
  EXCEPTION WHEN SQLSTATE 'SQ001' THEN
    -- The slots are released.
  END;
  IF sqlaqueue_contended THEN
    PERFORM pg_catalog.set_config('sqlaqueue.contended', 'on', true);
  END IF;
  IF sqlaqueue_with_full IS NOT NULL THEN
    PERFORM pg_catalog.set_config(sqlaqueue_name, sqlaqueue_with_full, true);
  END IF;
  RETURN false;
END
$_$;
COMMENT ON FUNCTION public.sqlaqueue_hold_full_delete(sqlaqueue_claim text, sqlaqueue_row tid, sqlaqueue_part oid, sqlaqueue_message tid, sqlaqueue_job text, sqlaqueue_order bigint, sqlaqueue_number integer, sqlaqueue_limits text[], sqlaqueue_keys bigint[], sqlaqueue_most integer[], sqlaqueue_changing boolean[]) IS 'sqlaqueue, version 2';
CREATE FUNCTION public.sqlaqueue_message_full_delete_sync() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
#variable_conflict use_column
BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    DELETE FROM sqlaqueue_message_full_delete;
    RETURN NULL;
  END IF;
  IF TG_OP = 'INSERT' THEN
    INSERT INTO sqlaqueue_message_full_delete (id, priority, run_at)
      SELECT id, priority, run_at FROM new_rows WHERE status OPERATOR(pg_catalog.=) 'pending'
      ON CONFLICT (id) DO UPDATE SET priority = excluded.priority, run_at = excluded.run_at;
    RETURN NULL;
  END IF;
  IF TG_OP = 'DELETE' THEN
    DELETE FROM sqlaqueue_message_full_delete WHERE id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT id FROM old_rows));
    RETURN NULL;
  END IF;
  DELETE FROM sqlaqueue_message_full_delete WHERE id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT id FROM old_rows WHERE status OPERATOR(pg_catalog.=) 'pending'
           EXCEPT SELECT id FROM new_rows WHERE status OPERATOR(pg_catalog.=) 'pending'));
  INSERT INTO sqlaqueue_message_full_delete (id, priority, run_at)
    SELECT id, priority, run_at FROM new_rows WHERE status OPERATOR(pg_catalog.=) 'pending'
    EXCEPT SELECT id, priority, run_at FROM old_rows WHERE status OPERATOR(pg_catalog.=) 'pending'
    ON CONFLICT (id) DO UPDATE SET priority = excluded.priority, run_at = excluded.run_at;
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_message_full_delete_sync() IS 'sqlaqueue, version 3';
CREATE FUNCTION public.sqlaqueue_message_plain_delete_sync() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
#variable_conflict use_column
BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    DELETE FROM sqlaqueue_message_plain_delete;
    RETURN NULL;
  END IF;
  IF TG_OP = 'INSERT' THEN
    INSERT INTO sqlaqueue_message_plain_delete (id, priority, run_at)
      SELECT id, priority, run_at FROM new_rows WHERE status OPERATOR(pg_catalog.=) 'pending'
      ON CONFLICT (id) DO UPDATE SET priority = excluded.priority, run_at = excluded.run_at;
    RETURN NULL;
  END IF;
  IF TG_OP = 'DELETE' THEN
    DELETE FROM sqlaqueue_message_plain_delete WHERE id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT id FROM old_rows));
    RETURN NULL;
  END IF;
  DELETE FROM sqlaqueue_message_plain_delete WHERE id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT id FROM old_rows WHERE status OPERATOR(pg_catalog.=) 'pending'
           EXCEPT SELECT id FROM new_rows WHERE status OPERATOR(pg_catalog.=) 'pending'));
  INSERT INTO sqlaqueue_message_plain_delete (id, priority, run_at)
    SELECT id, priority, run_at FROM new_rows WHERE status OPERATOR(pg_catalog.=) 'pending'
    EXCEPT SELECT id, priority, run_at FROM old_rows WHERE status OPERATOR(pg_catalog.=) 'pending'
    ON CONFLICT (id) DO UPDATE SET priority = excluded.priority, run_at = excluded.run_at;
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_message_plain_delete_sync() IS 'sqlaqueue, version 3';
CREATE FUNCTION public.sqlaqueue_rate_capacity(sqlaqueue_claim text, sqlaqueue_number integer, sqlaqueue_queue text, sqlaqueue_rate text, sqlaqueue_key bigint, sqlaqueue_seconds double precision, sqlaqueue_burst integer, sqlaqueue_lock boolean) RETURNS integer
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $_$
DECLARE
  sqlaqueue_free integer;
  sqlaqueue_now timestamptz;
  sqlaqueue_next timestamptz;
  sqlaqueue_until timestamptz;
  sqlaqueue_step interval := pg_catalog.make_interval(secs => sqlaqueue_seconds);
  sqlaqueue_salted text := ',' || pg_catalog.hashint8extended(sqlaqueue_key, sqlaqueue_number) || ',';
  sqlaqueue_name text := 'sqlaqueue.claim_' || (sqlaqueue_key & 63);
  sqlaqueue_record text := pg_catalog.current_setting(sqlaqueue_name, true);
  sqlaqueue_room boolean;
  sqlaqueue_full text := '!' || sqlaqueue_burst || ' ' || pg_catalog.btrim(sqlaqueue_salted, ',') || '!';
BEGIN
  IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'sqlaqueue: a claim of a queue with limits, rates or an order needs READ COMMITTED; '
      'this transaction is %', pg_catalog.upper(pg_catalog.current_setting('transaction_isolation'))
      USING ERRCODE = 'feature_not_supported';
  END IF;
  IF pg_catalog.starts_with(sqlaqueue_record, sqlaqueue_claim) IS NOT TRUE THEN
    sqlaqueue_record := sqlaqueue_claim;
  END IF;
  IF pg_catalog.strpos(sqlaqueue_record, sqlaqueue_full) > 0 THEN
    RETURN 0;
  END IF;
  sqlaqueue_room := pg_catalog.current_setting('sqlaqueue.room', true) IS NOT DISTINCT FROM sqlaqueue_claim;
  IF sqlaqueue_room AND NOT sqlaqueue_lock THEN
    RETURN 1;
  END IF;
  FOR sqlaqueue_round IN 1 .. 2 LOOP
    IF NOT sqlaqueue_room OR sqlaqueue_round = 2 THEN
    IF sqlaqueue_round = 1 THEN
      SELECT r.next_at, r.throttled_until INTO sqlaqueue_next, sqlaqueue_until FROM sqlaqueue_rate AS r WHERE r.queue = sqlaqueue_queue AND r.rate = sqlaqueue_rate AND r.key = sqlaqueue_key;
    ELSE
      -- A transaction that holds the key back may have locked the row. The claim must not wait for it.
      SELECT r.next_at, r.throttled_until INTO sqlaqueue_next, sqlaqueue_until FROM sqlaqueue_rate AS r WHERE r.queue = sqlaqueue_queue AND r.rate = sqlaqueue_rate AND r.key = sqlaqueue_key
        FOR NO KEY UPDATE SKIP LOCKED;
      IF NOT FOUND AND EXISTS (SELECT FROM sqlaqueue_rate AS r WHERE r.queue = sqlaqueue_queue AND r.rate = sqlaqueue_rate AND r.key = sqlaqueue_key) THEN
        PERFORM pg_catalog.set_config('sqlaqueue.contended', 'on', true);
        RETURN 0;
      END IF;
    END IF;
    sqlaqueue_now := pg_catalog.clock_timestamp();
    IF sqlaqueue_until > sqlaqueue_now THEN
      IF sqlaqueue_round = 2 THEN
        PERFORM pg_catalog.set_config('sqlaqueue.room', '', true);
      END IF;
      RETURN 0;
    END IF;
    IF sqlaqueue_next > sqlaqueue_now + sqlaqueue_burst * sqlaqueue_step THEN
      -- The clock was set back. It must not hold the key back for longer than a whole burst. The key is locked first.
      sqlaqueue_next := sqlaqueue_now;
      IF sqlaqueue_round = 2 THEN
        sqlaqueue_next := sqlaqueue_now + sqlaqueue_burst * sqlaqueue_step;
        UPDATE sqlaqueue_rate AS r SET next_at = sqlaqueue_next WHERE r.queue = sqlaqueue_queue AND r.rate = sqlaqueue_rate AND r.key = sqlaqueue_key;
      END IF;
    END IF;
    sqlaqueue_next := greatest(sqlaqueue_next, sqlaqueue_now);
    sqlaqueue_free := sqlaqueue_burst - pg_catalog.ceil(
      extract(epoch FROM sqlaqueue_next - sqlaqueue_now)::float8 / sqlaqueue_seconds)::integer;
    sqlaqueue_free := sqlaqueue_free - (pg_catalog.length(sqlaqueue_record) - pg_catalog.length(
      pg_catalog.replace(sqlaqueue_record, sqlaqueue_salted, ''))) / pg_catalog.length(sqlaqueue_salted);
    IF sqlaqueue_free <= 0 THEN
      PERFORM pg_catalog.set_config(sqlaqueue_name, sqlaqueue_record || sqlaqueue_full, true);
      IF sqlaqueue_round = 2 THEN
        PERFORM pg_catalog.set_config('sqlaqueue.room', '', true);
      END IF;
      RETURN 0;
    END IF;
    END IF;
    EXIT WHEN NOT sqlaqueue_lock OR sqlaqueue_round = 2;
    IF NOT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashint8extended(sqlaqueue_key, pg_catalog.hashtextextended(sqlaqueue_queue || ' ' || sqlaqueue_rate, $sqlaqueue_name$sqlaqueue_rate$sqlaqueue_name$::regclass::oid::bigint))) THEN
      PERFORM pg_catalog.set_config('sqlaqueue.contended', 'on', true);
      RETURN 0;
    END IF;
  END LOOP;
  IF sqlaqueue_lock AND NOT sqlaqueue_room THEN
    PERFORM pg_catalog.set_config('sqlaqueue.room', sqlaqueue_claim, true);
  END IF;
  RETURN sqlaqueue_free;
END
$_$;
COMMENT ON FUNCTION public.sqlaqueue_rate_capacity(sqlaqueue_claim text, sqlaqueue_number integer, sqlaqueue_queue text, sqlaqueue_rate text, sqlaqueue_key bigint, sqlaqueue_seconds double precision, sqlaqueue_burst integer, sqlaqueue_lock boolean) IS 'sqlaqueue, version 2';
CREATE FUNCTION public.sqlaqueue_schedule_changed() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
BEGIN
  IF TG_LEVEL = 'ROW' THEN
    IF OLD.cron IS DISTINCT FROM NEW.cron OR OLD.every IS DISTINCT FROM NEW.every OR OLD.timezone IS DISTINCT FROM NEW.timezone OR OLD.paused_at IS DISTINCT FROM NEW.paused_at THEN
      UPDATE sqlaqueue_schedule SET edited_at = pg_catalog.clock_timestamp(),
        next_tick = CASE WHEN NEW.paused_at IS NULL THEN next_tick END WHERE name = NEW.name;
    END IF;
  END IF;
  PERFORM pg_catalog.pg_notify('sqlaqueue_schedule', 'poll');
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_schedule_changed() IS 'sqlaqueue, version 1';
CREATE FUNCTION public.sqlaqueue_waits_import_apply() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
  sqlaqueue_looks jsonb;
  sqlaqueue_0 jsonb;
  sqlaqueue_free jsonb;
  sqlaqueue_begun text;
  sqlaqueue_lock record;
BEGIN
  -- The first call takes all that this transaction has recorded. The index still has the deleted rows, so the others
  -- look for their own row only, and none searches before it.
  PERFORM 1 FROM sqlaqueue_waits_import WHERE xact = NEW.xact AND id = NEW.id;
  IF NOT FOUND THEN
    RETURN NULL;
  END IF;
  WITH gone AS (DELETE FROM sqlaqueue_waits_import WHERE xact = NEW.xact AND id >= NEW.id RETURNING relation, keys),
    e AS (SELECT gone.relation, jsonb_array_elements(gone.keys) AS entry FROM gone)
  SELECT jsonb_agg(e.entry) FILTER (WHERE e.relation = ''), jsonb_agg(e.entry) FILTER (WHERE e.relation = 'lines')
    INTO sqlaqueue_looks, sqlaqueue_0 FROM e;
  FOR sqlaqueue_lock IN
    SELECT k.class, k.bucket, bool_or(k.alone) AS alone FROM (
      SELECT 232808864, hashtext(jsonb_build_array(c->0)::text) % 128, false
        FROM jsonb_array_elements(sqlaqueue_0) AS c
      UNION ALL SELECT 232808864, hashtext(jsonb_build_array(w.id)::text) % 128, true
        FROM jsonb_array_elements(sqlaqueue_looks) AS l JOIN import AS w ON w.id OPERATOR(pg_catalog.=) (l->>0)::INTEGER
        WHERE (l->>1)::integer & 1 <> 0
    ) AS k (class, bucket, alone) GROUP BY 1, 2 ORDER BY 1, 2
  LOOP
    IF sqlaqueue_lock.alone THEN
      PERFORM pg_advisory_xact_lock(sqlaqueue_lock.class, sqlaqueue_lock.bucket);
    ELSE
      PERFORM pg_advisory_xact_lock_shared(sqlaqueue_lock.class, sqlaqueue_lock.bucket);
    END IF;
  END LOOP;
  SELECT jsonb_agg(jsonb_build_array(f.id)) INTO sqlaqueue_free FROM (
    SELECT w.id FROM import AS w WHERE (w.id) OPERATOR(pg_catalog.=) ANY (SELECT (l->>0)::INTEGER FROM jsonb_array_elements(sqlaqueue_looks) AS l
      UNION SELECT o.id FROM jsonb_array_elements(sqlaqueue_0) AS c JOIN import AS o ON o.id OPERATOR(pg_catalog.=) (c->>0)::INTEGER)
      AND ((w.status OPERATOR(pg_catalog.=) 'waiting' OR w.status OPERATOR(pg_catalog.=) 'pending'))
    ORDER BY w.id FOR NO KEY UPDATE OF w
  ) AS f;
  IF sqlaqueue_0 IS NOT NULL THEN
    SELECT concat_ws(', ', w.id) INTO sqlaqueue_begun
      FROM (SELECT * FROM (SELECT (c->>0)::INTEGER AS k0, sum((c->>1)::bigint)::bigint AS n, bool_or((c->>2)::bigint > 0) AS failed, bool_or((c->>2)::bigint < 0 AND (c->>3)::bigint >= 0) AS mended, bool_or((c->>1)::bigint > 0 AND (c->>3)::bigint > 0) AS added FROM jsonb_array_elements(sqlaqueue_0) AS c GROUP BY 1) AS s WHERE s.added) AS d JOIN import AS w ON w.id OPERATOR(pg_catalog.=) d.k0 WHERE coalesce(CASE WHEN (w.id) OPERATOR(pg_catalog.=) ANY (SELECT (l->>0)::INTEGER FROM jsonb_array_elements(sqlaqueue_free) AS l) THEN true END, false) = false AND (sqlaqueue_looks IS NULL OR NOT (w.id) OPERATOR(pg_catalog.=) ANY (SELECT (l->>0)::INTEGER FROM jsonb_array_elements(sqlaqueue_looks) AS l WHERE (l->>2)::boolean)) LIMIT 1;
    IF FOUND THEN
      RAISE EXCEPTION 'Import % has started or ended: it takes no further Line', sqlaqueue_begun USING ERRCODE = 'check_violation',
        HINT = 'Add jobs while the batch waits, for example from one of its jobs, or start a new batch.';
    END IF;
  END IF;
  IF sqlaqueue_free IS NULL THEN
    RETURN NULL;
  END IF;
  IF sqlaqueue_0 IS NOT NULL THEN
    UPDATE import AS w SET waits_for_count = greatest(w.waits_for_count + d.n, 0)
      FROM (SELECT (c->>0)::INTEGER AS k0, sum((c->>1)::bigint)::bigint AS n, bool_or((c->>2)::bigint > 0) AS failed, bool_or((c->>2)::bigint < 0 AND (c->>3)::bigint >= 0) AS mended, bool_or((c->>1)::bigint > 0 AND (c->>3)::bigint > 0) AS added FROM jsonb_array_elements(sqlaqueue_0) AS c GROUP BY 1) AS d
      WHERE w.id OPERATOR(pg_catalog.=) d.k0 AND d.n <> 0 AND CASE WHEN (w.id) OPERATOR(pg_catalog.=) ANY (SELECT (l->>0)::INTEGER FROM jsonb_array_elements(sqlaqueue_free) AS l) THEN true END
        AND (sqlaqueue_looks IS NULL OR NOT (w.id) OPERATOR(pg_catalog.=) ANY (SELECT (l->>0)::INTEGER FROM jsonb_array_elements(sqlaqueue_looks) AS l));
  END IF;
  IF sqlaqueue_looks IS NOT NULL THEN
    UPDATE import AS w SET waits_for_count = d.sqlaqueue_n
      FROM (SELECT w.id, (SELECT count(*) FROM line AS t WHERE t.import_id OPERATOR(pg_catalog.=) w.id AND ((t.status OPERATOR(pg_catalog.=) 'completed' OR t.status OPERATOR(pg_catalog.=) 'failed' OR t.status OPERATOR(pg_catalog.=) 'cancelled') IS NOT TRUE)) AS sqlaqueue_n, false AS sqlaqueue_lost
        FROM import AS w WHERE (w.id) OPERATOR(pg_catalog.=) ANY (SELECT (l->>0)::INTEGER FROM jsonb_array_elements(sqlaqueue_looks) AS l)) AS d
      WHERE w.id OPERATOR(pg_catalog.=) d.id AND CASE WHEN (w.id) OPERATOR(pg_catalog.=) ANY (SELECT (l->>0)::INTEGER FROM jsonb_array_elements(sqlaqueue_free) AS l) THEN true END
        AND (d.sqlaqueue_n IS DISTINCT FROM w.waits_for_count OR d.sqlaqueue_n > 0 AND (w.status OPERATOR(pg_catalog.=) 'pending') OR d.sqlaqueue_lost);
  END IF;
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_waits_import_apply() IS 'sqlaqueue, version 2';
CREATE FUNCTION public.sqlaqueue_waits_import_cancel() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
#variable_conflict use_column
BEGIN
  WITH free AS (SELECT t.id FROM line AS t WHERE t.import_id OPERATOR(pg_catalog.=) NEW.id AND (t.status OPERATOR(pg_catalog.=) 'pending')
      FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE line AS t SET status = 'cancelled', finished_at = statement_timestamp(), lease_token = NULL FROM free WHERE t.id OPERATOR(pg_catalog.=) free.id;
  INSERT INTO sqlaqueue_control (queue, key, created_at)
    SELECT 'line', jsonb_build_array(id), statement_timestamp() FROM line AS t
      WHERE t.import_id OPERATOR(pg_catalog.=) NEW.id AND (t.status OPERATOR(pg_catalog.=) 'pending' OR t.status OPERATOR(pg_catalog.=) 'processing')
    ON CONFLICT (queue, key) DO UPDATE SET created_at = excluded.created_at;
  IF FOUND THEN
    PERFORM pg_notify('sqlaqueue_line_line', 'cancel_requested');
  END IF;
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_waits_import_cancel() IS 'sqlaqueue, version 2';
CREATE FUNCTION public.sqlaqueue_waits_import_lines_changed() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
  sqlaqueue_begun text;
BEGIN
  IF TG_OP = 'INSERT' THEN
    SELECT concat_ws(', ', w.id) INTO sqlaqueue_begun
      FROM (SELECT DISTINCT r.import_id AS k0 FROM new_rows AS r WHERE r.import_id IS NOT NULL AND ((r.status OPERATOR(pg_catalog.=) 'completed' OR r.status OPERATOR(pg_catalog.=) 'failed' OR r.status OPERATOR(pg_catalog.=) 'cancelled') IS NOT TRUE)) AS d JOIN import AS w ON w.id OPERATOR(pg_catalog.=) d.k0 WHERE (w.status OPERATOR(pg_catalog.=) 'waiting' OR w.status OPERATOR(pg_catalog.=) 'pending') IS NOT TRUE LIMIT 1;
    IF FOUND THEN
      RAISE EXCEPTION 'Import % has started or ended: it takes no further Line', sqlaqueue_begun USING ERRCODE = 'check_violation',
        HINT = 'Add jobs while the batch waits, for example from one of its jobs, or start a new batch.';
    END IF;
    INSERT INTO sqlaqueue_waits_import (relation, keys)
    SELECT 'lines', jsonb_agg(e.entry)
      FROM (SELECT c.entry, row_number() OVER () / 10000 AS chunk FROM (SELECT jsonb_build_array(d.import_id, sum(d.n), sum(d.f), sum(d.a)) AS entry
          FROM (SELECT r.import_id, ((r.status OPERATOR(pg_catalog.=) 'completed' OR r.status OPERATOR(pg_catalog.=) 'failed' OR r.status OPERATOR(pg_catalog.=) 'cancelled') IS NOT TRUE)::int AS n, 0 AS f, 1 AS a FROM new_rows AS r WHERE r.import_id IS NOT NULL) AS d
          GROUP BY d.import_id
          HAVING sum(d.n) <> 0 OR sum(d.f) <> 0) AS c) AS e
      GROUP BY e.chunk;
  ELSIF TG_OP = 'DELETE' THEN
    INSERT INTO sqlaqueue_waits_import (relation, keys)
    SELECT 'lines', jsonb_agg(e.entry)
      FROM (SELECT c.entry, row_number() OVER () / 10000 AS chunk FROM (SELECT jsonb_build_array(d.import_id, sum(d.n), sum(d.f), sum(d.a)) AS entry
          FROM (SELECT r.import_id, -((r.status OPERATOR(pg_catalog.=) 'completed' OR r.status OPERATOR(pg_catalog.=) 'failed' OR r.status OPERATOR(pg_catalog.=) 'cancelled') IS NOT TRUE)::int AS n, -0 AS f, -1 AS a FROM old_rows AS r WHERE r.import_id IS NOT NULL) AS d
          GROUP BY d.import_id
          HAVING sum(d.n) <> 0 OR sum(d.f) <> 0) AS c) AS e
      GROUP BY e.chunk;
  ELSE
    INSERT INTO sqlaqueue_waits_import (relation, keys)
    SELECT 'lines', jsonb_agg(e.entry)
      FROM (SELECT c.entry, row_number() OVER () / 10000 AS chunk FROM (SELECT jsonb_build_array(d.import_id, sum(d.n), sum(d.f), sum(d.a)) AS entry
          FROM (SELECT r.import_id, ((r.status OPERATOR(pg_catalog.=) 'completed' OR r.status OPERATOR(pg_catalog.=) 'failed' OR r.status OPERATOR(pg_catalog.=) 'cancelled') IS NOT TRUE)::int AS n, 0 AS f, 1 AS a FROM new_rows AS r WHERE r.import_id IS NOT NULL UNION ALL SELECT r.import_id, -((r.status OPERATOR(pg_catalog.=) 'completed' OR r.status OPERATOR(pg_catalog.=) 'failed' OR r.status OPERATOR(pg_catalog.=) 'cancelled') IS NOT TRUE)::int AS n, -0 AS f, -1 AS a FROM old_rows AS r WHERE r.import_id IS NOT NULL) AS d
          GROUP BY d.import_id
          HAVING sum(d.n) <> 0 OR sum(d.f) <> 0) AS c) AS e
      GROUP BY e.chunk;
  END IF;
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_waits_import_lines_changed() IS 'sqlaqueue, version 2';
CREATE FUNCTION public.sqlaqueue_waits_import_look() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
BEGIN
  IF TG_LEVEL = 'ROW' THEN
    INSERT INTO sqlaqueue_waits_import (relation, keys)
      SELECT '', jsonb_build_array(jsonb_build_array(NEW.id, CASE WHEN ((OLD.status OPERATOR(pg_catalog.=) 'waiting' OR OLD.status OPERATOR(pg_catalog.=) 'pending')) IS NOT TRUE THEN 1 ELSE 0 END, to_jsonb(OLD.id) IS DISTINCT FROM to_jsonb(NEW.id)));
    RETURN NULL;
  END IF;
  INSERT INTO sqlaqueue_waits_import (relation, keys)
    SELECT '', jsonb_agg(e.entry)
      FROM (SELECT c.entry, row_number() OVER () / 10000 AS chunk FROM (SELECT jsonb_build_array(n.id, 0, true) AS entry FROM new_rows AS n) AS c) AS e
      GROUP BY e.chunk;
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_waits_import_look() IS 'sqlaqueue, version 2';
CREATE FUNCTION public.sqlaqueue_waits_import_state() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
  IF NEW.waits_for_count OPERATOR(pg_catalog.>) 0 THEN
    NEW.status := 'waiting';
  ELSE
    NEW.run_at := greatest(NEW.run_at, pg_catalog.statement_timestamp());
    NEW.status := 'pending';
  END IF;
  RETURN NEW;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_waits_import_state() IS 'sqlaqueue, version 2';
CREATE FUNCTION public.sqlaqueue_wake_call() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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
    IF NEW.lease_token IS NOT NULL THEN
      PERFORM pg_catalog.pg_notify('sqlaqueue_call_call', 'quarantined');
    END IF;
  END IF;
  -- An error, as of a server that has no room for another lock, must not fail the statement.
  BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock_shared(1959982707, -236247542) THEN
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
  PERFORM pg_catalog.pg_notify('sqlaqueue_call_call', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_wake_call() IS 'sqlaqueue, version 5';
CREATE FUNCTION public.sqlaqueue_wake_full_batch() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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
    IF pg_catalog.pg_try_advisory_xact_lock_shared(1792756107, -1129267923) THEN
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
  PERFORM pg_catalog.pg_notify('sqlaqueue_full_batch_full_batch', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_wake_full_batch() IS 'sqlaqueue, version 5';
CREATE FUNCTION public.sqlaqueue_wake_full_delete() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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
    IF pg_catalog.pg_try_advisory_xact_lock_shared(1483359697, -43516197) THEN
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
  PERFORM pg_catalog.pg_notify('sqlaqueue_full_delete_full_delete', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_wake_full_delete() IS 'sqlaqueue, version 5';
CREATE FUNCTION public.sqlaqueue_wake_full_update() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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
    IF NEW.lease_token IS NOT NULL THEN
      PERFORM pg_catalog.pg_notify('sqlaqueue_full_update_full_update', 'quarantined');
    END IF;
  END IF;
  -- An error, as of a server that has no room for another lock, must not fail the statement.
  BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock_shared(467505051, -1007178020) THEN
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
  PERFORM pg_catalog.pg_notify('sqlaqueue_full_update_full_update', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_wake_full_update() IS 'sqlaqueue, version 5';
CREATE FUNCTION public.sqlaqueue_wake_import() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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
    IF NEW.lease_token IS NOT NULL THEN
      PERFORM pg_catalog.pg_notify('sqlaqueue_import_import', 'quarantined');
    END IF;
  END IF;
  -- An error, as of a server that has no room for another lock, must not fail the statement.
  BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock_shared(2082281572, -1770007587) THEN
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
  PERFORM pg_catalog.pg_notify('sqlaqueue_import_import', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_wake_import() IS 'sqlaqueue, version 5';
CREATE FUNCTION public.sqlaqueue_wake_line() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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
    IF NEW.lease_token IS NOT NULL THEN
      PERFORM pg_catalog.pg_notify('sqlaqueue_line_line', 'quarantined');
    END IF;
  END IF;
  -- An error, as of a server that has no room for another lock, must not fail the statement.
  BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock_shared(1154428715, 679870146) THEN
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
  PERFORM pg_catalog.pg_notify('sqlaqueue_line_line', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_wake_line() IS 'sqlaqueue, version 5';
CREATE FUNCTION public.sqlaqueue_wake_message() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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
    IF pg_catalog.pg_try_advisory_xact_lock_shared(2102653646, 487001734) THEN
      RETURN NULL;
    END IF;
  EXCEPTION WHEN OTHERS THEN
  END;
  IF TG_LEVEL OPERATOR(pg_catalog.=) 'STATEMENT' THEN
    SELECT pg_catalog.count(*), pg_catalog.min(run_at)::timestamp with time zone, pg_catalog.max(run_at)::timestamp with time zone INTO sqlaqueue_jobs, sqlaqueue_first, sqlaqueue_last
      FROM new_rows
      WHERE TRUE;
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
  PERFORM pg_catalog.pg_notify('sqlaqueue_message_message', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_wake_message() IS 'sqlaqueue, version 5';
CREATE FUNCTION public.sqlaqueue_wake_ordered() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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
    IF NEW.lease_token IS NOT NULL THEN
      PERFORM pg_catalog.pg_notify('sqlaqueue_ordered_ordered', 'quarantined');
    END IF;
  END IF;
  -- An error, as of a server that has no room for another lock, must not fail the statement.
  BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock_shared(1028006947, -348361458) THEN
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
  PERFORM pg_catalog.pg_notify('sqlaqueue_ordered_ordered', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_wake_ordered() IS 'sqlaqueue, version 5';
CREATE FUNCTION public.sqlaqueue_wake_plain_batch() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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
    IF pg_catalog.pg_try_advisory_xact_lock_shared(2027067698, 141186587) THEN
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
  PERFORM pg_catalog.pg_notify('sqlaqueue_plain_batch_plain_batch', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_wake_plain_batch() IS 'sqlaqueue, version 5';
CREATE FUNCTION public.sqlaqueue_wake_plain_delete() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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
    IF pg_catalog.pg_try_advisory_xact_lock_shared(-1046045371, -41468026) THEN
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
  PERFORM pg_catalog.pg_notify('sqlaqueue_plain_delete_plain_delete', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_wake_plain_delete() IS 'sqlaqueue, version 5';
CREATE FUNCTION public.sqlaqueue_wake_plain_update() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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
    IF NEW.lease_token IS NOT NULL THEN
      PERFORM pg_catalog.pg_notify('sqlaqueue_plain_update_plain_update', 'quarantined');
    END IF;
  END IF;
  -- An error, as of a server that has no room for another lock, must not fail the statement.
  BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock_shared(1154724681, 2018016732) THEN
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
  PERFORM pg_catalog.pg_notify('sqlaqueue_plain_update_plain_update', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_wake_plain_update() IS 'sqlaqueue, version 5';
CREATE FUNCTION public.sqlaqueue_wake_ticked() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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
    IF NEW.lease_token IS NOT NULL THEN
      PERFORM pg_catalog.pg_notify('sqlaqueue_ticked_ticked', 'quarantined');
    END IF;
  END IF;
  -- An error, as of a server that has no room for another lock, must not fail the statement.
  BEGIN
    IF pg_catalog.pg_try_advisory_xact_lock_shared(942525564, -317529949) THEN
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
  PERFORM pg_catalog.pg_notify('sqlaqueue_ticked_ticked', pg_catalog.concat_ws(' ', 'pending', pg_catalog.pg_current_xact_id(),
    sqlaqueue_jobs, coalesce(sqlaqueue_due, 0), CASE WHEN sqlaqueue_last OPERATOR(pg_catalog.>) sqlaqueue_first THEN 'more' END));
  RETURN NULL;
END
$$;
COMMENT ON FUNCTION public.sqlaqueue_wake_ticked() IS 'sqlaqueue, version 5';
CREATE TABLE public.call (
    function text NOT NULL,
    arguments jsonb NOT NULL,
    result jsonb,
    id integer NOT NULL,
    status character varying(20) DEFAULT 'pending'::character varying NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts smallint,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    lease_token uuid,
    lease_expires_at timestamp with time zone,
    claimed_by text
);
CREATE SEQUENCE public.call_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.call_id_seq OWNED BY public.call.id;
CREATE TABLE public.effect (
    queue character varying(60) NOT NULL,
    key character varying(60) NOT NULL,
    version character varying(60) NOT NULL
);
CREATE TABLE public.full_batch (
    id integer NOT NULL,
    key character varying(60) NOT NULL,
    customer character varying(60) DEFAULT 'a'::character varying NOT NULL,
    status character varying(20) DEFAULT 'pending'::character varying NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts smallint,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    traceparent text DEFAULT NULLIF(current_setting('sqlaqueue.traceparent'::text, true), ''::text)
);
CREATE SEQUENCE public.full_batch_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.full_batch_id_seq OWNED BY public.full_batch.id;
CREATE TABLE public.full_delete (
    id integer NOT NULL,
    key character varying(60) NOT NULL,
    customer character varying(60) DEFAULT 'a'::character varying NOT NULL,
    status character varying(20) DEFAULT 'pending'::character varying NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts smallint,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    traceparent text DEFAULT NULLIF(current_setting('sqlaqueue.traceparent'::text, true), ''::text)
);
CREATE SEQUENCE public.full_delete_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.full_delete_id_seq OWNED BY public.full_delete.id;
CREATE TABLE public.full_update (
    id integer NOT NULL,
    key character varying(60) NOT NULL,
    customer character varying(60) DEFAULT 'a'::character varying NOT NULL,
    status character varying(20) DEFAULT 'pending'::character varying NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts smallint,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    lease_token uuid,
    lease_expires_at timestamp with time zone,
    claimed_by text,
    traceparent text DEFAULT NULLIF(current_setting('sqlaqueue.traceparent'::text, true), ''::text)
);
CREATE SEQUENCE public.full_update_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.full_update_id_seq OWNED BY public.full_update.id;
CREATE TABLE public.import (
    id integer NOT NULL,
    key character varying(60) NOT NULL,
    customer character varying(60) DEFAULT 'a'::character varying NOT NULL,
    status character varying(20) DEFAULT 'waiting'::character varying NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts smallint,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    lease_token uuid,
    lease_expires_at timestamp with time zone,
    claimed_by text,
    waits_for_count integer DEFAULT 1
);
CREATE SEQUENCE public.import_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.import_id_seq OWNED BY public.import.id;
CREATE TABLE public.line (
    import_id integer,
    id integer NOT NULL,
    key character varying(60) NOT NULL,
    customer character varying(60) DEFAULT 'a'::character varying NOT NULL,
    status character varying(20) DEFAULT 'pending'::character varying NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts smallint,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    lease_token uuid,
    lease_expires_at timestamp with time zone,
    claimed_by text
);
CREATE SEQUENCE public.line_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.line_id_seq OWNED BY public.line.id;
CREATE TABLE public.message (
    id integer NOT NULL,
    key character varying(60) NOT NULL,
    customer character varying(60) DEFAULT 'a'::character varying NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts smallint,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone
);
CREATE SEQUENCE public.message_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.message_id_seq OWNED BY public.message.id;
CREATE TABLE public.ordered (
    id integer NOT NULL,
    key character varying(60) NOT NULL,
    customer character varying(60) DEFAULT 'a'::character varying NOT NULL,
    status character varying(20) DEFAULT 'pending'::character varying NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts smallint,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    lease_token uuid,
    lease_expires_at timestamp with time zone,
    claimed_by text,
    started_at timestamp with time zone
);
CREATE SEQUENCE public.ordered_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.ordered_id_seq OWNED BY public.ordered.id;
CREATE TABLE public.plain_batch (
    id integer NOT NULL,
    key character varying(60) NOT NULL,
    customer character varying(60) DEFAULT 'a'::character varying NOT NULL,
    status character varying(20) DEFAULT 'pending'::character varying NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts smallint,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone
);
CREATE SEQUENCE public.plain_batch_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.plain_batch_id_seq OWNED BY public.plain_batch.id;
CREATE TABLE public.plain_delete (
    id integer NOT NULL,
    key character varying(60) NOT NULL,
    customer character varying(60) DEFAULT 'a'::character varying NOT NULL,
    status character varying(20) DEFAULT 'pending'::character varying NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts smallint,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone
);
CREATE SEQUENCE public.plain_delete_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.plain_delete_id_seq OWNED BY public.plain_delete.id;
CREATE TABLE public.plain_update (
    id integer NOT NULL,
    key character varying(60) NOT NULL,
    customer character varying(60) DEFAULT 'a'::character varying NOT NULL,
    status character varying(20) DEFAULT 'pending'::character varying NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts smallint,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    lease_token uuid,
    lease_expires_at timestamp with time zone,
    claimed_by text
);
CREATE SEQUENCE public.plain_update_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.plain_update_id_seq OWNED BY public.plain_update.id;
CREATE TABLE public.sent (
    queue character varying(60) NOT NULL,
    key character varying(60) NOT NULL
);
CREATE TABLE public.sqlaqueue_attempt (
    id bigint NOT NULL,
    queue text NOT NULL,
    key jsonb NOT NULL,
    attempt integer NOT NULL,
    started_at timestamp with time zone,
    ended_at timestamp with time zone NOT NULL,
    worker text,
    outcome text NOT NULL,
    error text,
    traceback text
);
ALTER TABLE public.sqlaqueue_attempt ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME public.sqlaqueue_attempt_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.sqlaqueue_consumer (
    id text NOT NULL,
    queue text NOT NULL,
    name text,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    listening boolean NOT NULL,
    running jsonb NOT NULL,
    claimed integer DEFAULT 0 NOT NULL,
    unclaimable jsonb DEFAULT '[]'::jsonb NOT NULL,
    heartbeat_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);
CREATE TABLE public.sqlaqueue_control (
    queue text NOT NULL,
    key jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);
CREATE TABLE public.sqlaqueue_crash_journal (
    id uuid NOT NULL,
    queue text NOT NULL,
    keys jsonb NOT NULL,
    starts integer NOT NULL,
    worker text,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);
CREATE TABLE public.sqlaqueue_dead_letter (
    queue text NOT NULL,
    key jsonb NOT NULL,
    "row" jsonb NOT NULL,
    state text NOT NULL,
    error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);
CREATE TABLE public.sqlaqueue_message_full_delete (
    id integer NOT NULL,
    priority smallint NOT NULL,
    run_at timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0');
CREATE TABLE public.sqlaqueue_message_plain_delete (
    id integer NOT NULL,
    priority smallint NOT NULL,
    run_at timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0');
CREATE TABLE public.sqlaqueue_minute (
    queue text NOT NULL,
    minute integer NOT NULL,
    pending integer,
    due integer,
    oldest_due integer,
    completed integer,
    retried integer,
    failed integer,
    cancelled integer,
    wait_0 integer,
    wait_1 integer,
    wait_2 integer,
    wait_3 integer,
    wait_4 integer,
    wait_5 integer,
    wait_6 integer,
    wait_7 integer,
    wait_8 integer,
    wait_9 integer,
    wait_10 integer,
    wait_11 integer,
    wait_12 integer,
    wait_13 integer,
    wait_14 integer,
    wait_15 integer,
    wait_16 integer,
    wait_17 integer,
    wait_18 integer,
    wait_19 integer,
    wait_20 integer,
    run_0 integer,
    run_1 integer,
    run_2 integer,
    run_3 integer,
    run_4 integer,
    run_5 integer,
    run_6 integer,
    run_7 integer,
    run_8 integer,
    run_9 integer,
    run_10 integer,
    run_11 integer,
    run_12 integer,
    run_13 integer,
    run_14 integer,
    run_15 integer,
    run_16 integer,
    run_17 integer,
    run_18 integer,
    run_19 integer,
    run_20 integer
);
CREATE TABLE public.sqlaqueue_rate (
    queue text NOT NULL,
    rate text NOT NULL,
    key bigint NOT NULL,
    next_at timestamp with time zone NOT NULL,
    throttled_until timestamp with time zone
);
CREATE TABLE public.sqlaqueue_schedule (
    name text NOT NULL,
    queue text NOT NULL,
    model text,
    cron text,
    every interval,
    timezone text DEFAULT 'UTC'::text NOT NULL,
    "values" jsonb DEFAULT '{}'::jsonb NOT NULL,
    factory text,
    jitter interval DEFAULT '00:00:00'::interval NOT NULL,
    catch_up integer DEFAULT 1 NOT NULL,
    misfire_grace interval,
    skip_unfinished boolean DEFAULT false NOT NULL,
    paused_at timestamp with time zone,
    run_requested_at timestamp with time zone,
    last_tick timestamp with time zone,
    next_tick timestamp with time zone,
    last_job jsonb,
    edited_at timestamp with time zone,
    planned_for text,
    planned_at timestamp with time zone,
    rules text,
    code jsonb,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT ck_sqlaqueue_schedule_catch_up CHECK (((catch_up >= 0) AND (catch_up <= 1000))),
    CONSTRAINT ck_sqlaqueue_schedule_cron_or_every CHECK (((cron IS NULL) <> (every IS NULL))),
    CONSTRAINT ck_sqlaqueue_schedule_every CHECK (((EXTRACT(epoch FROM every) >= (1)::numeric) AND (EXTRACT(epoch FROM every) <= ('3155760000'::bigint)::numeric))),
    CONSTRAINT ck_sqlaqueue_schedule_moments CHECK ((((created_at IS NULL) OR ((created_at > to_timestamp((0)::double precision)) AND (created_at < to_timestamp(('221845392000'::bigint)::double precision)))) AND ((paused_at IS NULL) OR ((paused_at > to_timestamp((0)::double precision)) AND (paused_at < to_timestamp(('221845392000'::bigint)::double precision)))) AND ((run_requested_at IS NULL) OR ((run_requested_at > to_timestamp((0)::double precision)) AND (run_requested_at < to_timestamp(('221845392000'::bigint)::double precision)))) AND ((last_tick IS NULL) OR ((last_tick > to_timestamp((0)::double precision)) AND (last_tick < to_timestamp(('221845392000'::bigint)::double precision)))) AND ((next_tick IS NULL) OR ((next_tick > to_timestamp((0)::double precision)) AND (next_tick < to_timestamp(('221845392000'::bigint)::double precision)))) AND ((edited_at IS NULL) OR ((edited_at > to_timestamp((0)::double precision)) AND (edited_at < to_timestamp(('221845392000'::bigint)::double precision)))))),
    CONSTRAINT ck_sqlaqueue_schedule_spans CHECK ((((EXTRACT(epoch FROM misfire_grace) >= (0)::numeric) AND (EXTRACT(epoch FROM misfire_grace) <= ('3155760000'::bigint)::numeric)) AND ((EXTRACT(epoch FROM jitter) >= (0)::numeric) AND (EXTRACT(epoch FROM jitter) <= ('3155760000'::bigint)::numeric))))
);
CREATE TABLE public.sqlaqueue_tick (
    schedule text NOT NULL,
    tick timestamp with time zone NOT NULL,
    queue text NOT NULL,
    key jsonb,
    fired_at timestamp with time zone DEFAULT now() NOT NULL
);
CREATE TABLE public.sqlaqueue_waits_import (
    xact bigint DEFAULT txid_current() NOT NULL,
    id bigint NOT NULL,
    relation text NOT NULL,
    keys jsonb NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0');
ALTER TABLE public.sqlaqueue_waits_import ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME public.sqlaqueue_waits_import_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.ticked (
    id integer NOT NULL,
    key character varying(60) NOT NULL,
    customer character varying(60) DEFAULT 'a'::character varying NOT NULL,
    status character varying(20) DEFAULT 'pending'::character varying NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts smallint,
    last_error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    lease_token uuid,
    lease_expires_at timestamp with time zone,
    claimed_by text
);
CREATE SEQUENCE public.ticked_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.ticked_id_seq OWNED BY public.ticked.id;
ALTER TABLE ONLY public.call ALTER COLUMN id SET DEFAULT nextval('public.call_id_seq'::regclass);
ALTER TABLE ONLY public.full_batch ALTER COLUMN id SET DEFAULT nextval('public.full_batch_id_seq'::regclass);
ALTER TABLE ONLY public.full_delete ALTER COLUMN id SET DEFAULT nextval('public.full_delete_id_seq'::regclass);
ALTER TABLE ONLY public.full_update ALTER COLUMN id SET DEFAULT nextval('public.full_update_id_seq'::regclass);
ALTER TABLE ONLY public.import ALTER COLUMN id SET DEFAULT nextval('public.import_id_seq'::regclass);
ALTER TABLE ONLY public.line ALTER COLUMN id SET DEFAULT nextval('public.line_id_seq'::regclass);
ALTER TABLE ONLY public.message ALTER COLUMN id SET DEFAULT nextval('public.message_id_seq'::regclass);
ALTER TABLE ONLY public.ordered ALTER COLUMN id SET DEFAULT nextval('public.ordered_id_seq'::regclass);
ALTER TABLE ONLY public.plain_batch ALTER COLUMN id SET DEFAULT nextval('public.plain_batch_id_seq'::regclass);
ALTER TABLE ONLY public.plain_delete ALTER COLUMN id SET DEFAULT nextval('public.plain_delete_id_seq'::regclass);
ALTER TABLE ONLY public.plain_update ALTER COLUMN id SET DEFAULT nextval('public.plain_update_id_seq'::regclass);
ALTER TABLE ONLY public.ticked ALTER COLUMN id SET DEFAULT nextval('public.ticked_id_seq'::regclass);
INSERT INTO public.call VALUES ('program.noted', '{"key": "ended-0-again"}', NULL, 1, 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:19:03.570841+00', NULL, NULL, NULL);
INSERT INTO public.call VALUES ('program.noted', '{"key": "ended-1"}', NULL, 2, 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:19:03.595899+00', NULL, NULL, NULL);
INSERT INTO public.call VALUES ('program.noted', '{"key": "ended-2"}', NULL, 3, 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:19:03.600347+00', NULL, NULL, NULL);
INSERT INTO public.call VALUES ('program.noted', '{"key": "due-3"}', NULL, 4, 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL);
INSERT INTO public.call VALUES ('program.noted', '{"key": "due-4-again"}', NULL, 5, 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL);
INSERT INTO public.call VALUES ('program.noted', '{"key": "due-5"}', NULL, 6, 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL);
INSERT INTO public.effect VALUES ('plain_update', 'ended-1', '0.1.0');
INSERT INTO public.effect VALUES ('plain_update', 'ended-2', '0.1.0');
INSERT INTO public.effect VALUES ('plain_update', 'ended-0-again', '0.1.0');
INSERT INTO public.effect VALUES ('plain_delete', 'ended-1', '0.1.0');
INSERT INTO public.effect VALUES ('plain_delete', 'ended-2', '0.1.0');
INSERT INTO public.effect VALUES ('plain_delete', 'ended-0-again', '0.1.0');
INSERT INTO public.effect VALUES ('plain_batch', 'ended-1', '0.1.0');
INSERT INTO public.effect VALUES ('plain_batch', 'ended-2', '0.1.0');
INSERT INTO public.effect VALUES ('full_update', 'ended-1', '0.1.0');
INSERT INTO public.effect VALUES ('full_update', 'ended-2', '0.1.0');
INSERT INTO public.effect VALUES ('full_update', 'ended-0-again', '0.1.0');
INSERT INTO public.effect VALUES ('full_delete', 'ended-1', '0.1.0');
INSERT INTO public.effect VALUES ('full_delete', 'ended-2', '0.1.0');
INSERT INTO public.effect VALUES ('full_delete', 'ended-0-again', '0.1.0');
INSERT INTO public.effect VALUES ('full_batch', 'ended-1', '0.1.0');
INSERT INTO public.effect VALUES ('full_batch', 'ended-2', '0.1.0');
INSERT INTO public.effect VALUES ('full_batch', 'ended-0-again', '0.1.0');
INSERT INTO public.effect VALUES ('ordered', 'ended-1', '0.1.0');
INSERT INTO public.effect VALUES ('ordered', 'ended-2', '0.1.0');
INSERT INTO public.effect VALUES ('ordered', 'ended-0-again', '0.1.0');
INSERT INTO public.effect VALUES ('message', 'ended-1', '0.1.0');
INSERT INTO public.effect VALUES ('message', 'ended-2', '0.1.0');
INSERT INTO public.effect VALUES ('message', 'ended-0-again', '0.1.0');
INSERT INTO public.effect VALUES ('line', 'ended-0-again.1', '0.1.0');
INSERT INTO public.effect VALUES ('line', 'ended-0-again.2', '0.1.0');
INSERT INTO public.effect VALUES ('line', 'ended-1.1', '0.1.0');
INSERT INTO public.effect VALUES ('line', 'ended-1.2', '0.1.0');
INSERT INTO public.effect VALUES ('line', 'ended-2.1', '0.1.0');
INSERT INTO public.effect VALUES ('line', 'ended-2.2', '0.1.0');
INSERT INTO public.effect VALUES ('call', 'ended-0-again', '0.1.0');
INSERT INTO public.effect VALUES ('call', 'ended-1', '0.1.0');
INSERT INTO public.effect VALUES ('call', 'ended-2', '0.1.0');
INSERT INTO public.effect VALUES ('import', 'ended-1', '0.1.0');
INSERT INTO public.effect VALUES ('import', 'ended-2', '0.1.0');
INSERT INTO public.effect VALUES ('import', 'ended-0-again', '0.1.0');
INSERT INTO public.full_batch VALUES (1, 'failed', 'a', 'failed', 0, '2026-11-30 12:18:41.409122+00', 1, NULL, 'Fail: it has to fail', '2026-11-30 12:18:41.409122+00', '2026-11-30 12:18:48.214646+00', NULL);
INSERT INTO public.full_batch VALUES (3, 'ended-1', 'customer 1', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:58.060662+00', NULL);
INSERT INTO public.full_batch VALUES (4, 'ended-2', 'customer 2', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:58.060662+00', NULL);
INSERT INTO public.full_batch VALUES (2, 'ended-0-again', 'customer 0', 'completed', 0, '2026-11-30 12:18:57.894873+00', 2, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:58.060662+00', NULL);
INSERT INTO public.full_batch VALUES (5, 'later', 'a', 'pending', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', NULL, NULL);
INSERT INTO public.full_batch VALUES (6, 'cancelled', 'a', 'cancelled', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', '2026-11-30 12:19:10.439237+00', NULL);
INSERT INTO public.full_batch VALUES (7, 'due-3', 'customer 0', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL);
INSERT INTO public.full_batch VALUES (8, 'due-4-again', 'customer 1', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL);
INSERT INTO public.full_batch VALUES (9, 'due-5', 'customer 2', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL);
INSERT INTO public.full_delete VALUES (1, 'failed', 'a', 'failed', 0, '2026-11-30 12:18:41.409122+00', 1, NULL, 'Fail: it has to fail', '2026-11-30 12:18:41.409122+00', '2026-11-30 12:18:46.147786+00', NULL);
INSERT INTO public.full_delete VALUES (3, 'ended-1', 'customer 1', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:56.533531+00', NULL);
INSERT INTO public.full_delete VALUES (4, 'ended-2', 'customer 2', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:56.885411+00', NULL);
INSERT INTO public.full_delete VALUES (2, 'ended-0-again', 'customer 0', 'completed', 0, '2026-11-30 12:18:57.006191+00', 2, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:57.033649+00', NULL);
INSERT INTO public.full_delete VALUES (5, 'later', 'a', 'pending', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', NULL, NULL);
INSERT INTO public.full_delete VALUES (6, 'cancelled', 'a', 'cancelled', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', '2026-11-30 12:19:10.397956+00', NULL);
INSERT INTO public.full_delete VALUES (7, 'due-3', 'customer 0', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL);
INSERT INTO public.full_delete VALUES (8, 'due-4-again', 'customer 1', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL);
INSERT INTO public.full_delete VALUES (9, 'due-5', 'customer 2', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL);
INSERT INTO public.full_update VALUES (1, 'failed', 'a', 'failed', 0, '2026-11-30 12:18:41.409122+00', 1, NULL, 'Fail: it has to fail', '2026-11-30 12:18:41.409122+00', '2026-11-30 12:18:44.42514+00', NULL, NULL, NULL, NULL);
INSERT INTO public.full_update VALUES (3, 'ended-1', 'customer 1', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:54.653642+00', NULL, NULL, NULL, NULL);
INSERT INTO public.full_update VALUES (4, 'ended-2', 'customer 2', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:54.932361+00', NULL, NULL, NULL, NULL);
INSERT INTO public.full_update VALUES (2, 'ended-0-again', 'customer 0', 'completed', 0, '2026-11-30 12:18:55.285028+00', 2, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:55.304163+00', NULL, NULL, NULL, NULL);
INSERT INTO public.full_update VALUES (5, 'later', 'a', 'pending', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.full_update VALUES (6, 'cancelled', 'a', 'cancelled', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', '2026-11-30 12:19:08.73942+00', NULL, NULL, NULL, NULL);
INSERT INTO public.full_update VALUES (7, 'due-3', 'customer 0', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.full_update VALUES (9, 'due-5', 'customer 2', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.full_update VALUES (8, 'due-4-again', 'customer 1', 'processing', 0, '2026-11-30 12:19:10.4964+00', 1, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, 'cbebde07-636b-4199-9e43-4a6c712e46b6', '2026-01-01 00:00:00+00', 'vm:12112', NULL);
INSERT INTO public.import VALUES (2, 'ended-1', 'a', 'completed', 0, '2026-11-30 12:19:02.493692+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:19:03.933894+00', NULL, NULL, NULL, 0);
INSERT INTO public.import VALUES (3, 'ended-2', 'a', 'completed', 0, '2026-11-30 12:19:02.545079+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:19:03.974232+00', NULL, NULL, NULL, 0);
INSERT INTO public.import VALUES (1, 'ended-0-again', 'a', 'completed', 0, '2026-11-30 12:19:03.958266+00', 2, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:19:04.014737+00', NULL, NULL, NULL, 0);
INSERT INTO public.import VALUES (4, 'due-3', 'a', 'waiting', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL, 2);
INSERT INTO public.import VALUES (5, 'due-4-again', 'a', 'waiting', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL, 2);
INSERT INTO public.import VALUES (6, 'due-5', 'a', 'waiting', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL, 2);
INSERT INTO public.line VALUES (1, 1, 'ended-0-again.1', 'a', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:19:02.270192+00', NULL, NULL, NULL);
INSERT INTO public.line VALUES (1, 2, 'ended-0-again.2', 'a', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:19:02.398223+00', NULL, NULL, NULL);
INSERT INTO public.line VALUES (2, 3, 'ended-1.1', 'a', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:19:02.422772+00', NULL, NULL, NULL);
INSERT INTO public.line VALUES (2, 4, 'ended-1.2', 'a', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:19:02.491797+00', NULL, NULL, NULL);
INSERT INTO public.line VALUES (3, 5, 'ended-2.1', 'a', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:19:02.527127+00', NULL, NULL, NULL);
INSERT INTO public.line VALUES (3, 6, 'ended-2.2', 'a', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:19:02.541632+00', NULL, NULL, NULL);
INSERT INTO public.line VALUES (4, 7, 'due-3.1', 'a', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL);
INSERT INTO public.line VALUES (4, 8, 'due-3.2', 'a', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL);
INSERT INTO public.line VALUES (5, 9, 'due-4-again.1', 'a', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL);
INSERT INTO public.line VALUES (5, 10, 'due-4-again.2', 'a', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL);
INSERT INTO public.line VALUES (6, 11, 'due-5.1', 'a', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL);
INSERT INTO public.line VALUES (6, 12, 'due-5.2', 'a', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL);
INSERT INTO public.message VALUES (5, 'later', 'a', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', NULL);
INSERT INTO public.message VALUES (6, 'due-3', 'customer 0', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL);
INSERT INTO public.message VALUES (7, 'due-4-again', 'customer 1', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL);
INSERT INTO public.message VALUES (8, 'due-5', 'customer 2', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL);
INSERT INTO public.ordered VALUES (1, 'failed', 'a', 'failed', 0, '2026-11-30 12:18:41.409122+00', 1, NULL, 'Fail: it has to fail', '2026-11-30 12:18:41.409122+00', '2026-11-30 12:18:49.28772+00', NULL, NULL, 'vm:12112', '2026-11-30 12:18:49.237813+00');
INSERT INTO public.ordered VALUES (3, 'ended-1', 'customer 1', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:58.895103+00', NULL, NULL, 'vm:12112', '2026-11-30 12:18:58.871326+00');
INSERT INTO public.ordered VALUES (4, 'ended-2', 'customer 2', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:58.941125+00', NULL, NULL, 'vm:12112', '2026-11-30 12:18:58.931727+00');
INSERT INTO public.ordered VALUES (2, 'ended-0-again', 'customer 0', 'completed', 0, '2026-11-30 12:18:58.747957+00', 2, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:58.976195+00', NULL, NULL, 'vm:12112', '2026-11-30 12:18:58.957583+00');
INSERT INTO public.ordered VALUES (5, 'later', 'a', 'pending', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.ordered VALUES (6, 'cancelled', 'a', 'cancelled', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', '2026-11-30 12:19:10.489779+00', NULL, NULL, NULL, NULL);
INSERT INTO public.ordered VALUES (8, 'due-4-again', 'customer 1', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.ordered VALUES (9, 'due-5', 'customer 2', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.ordered VALUES (7, 'due-3', 'customer 0', 'processing', 0, '2026-11-30 12:19:10.4964+00', 1, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, '10f23c5c-180c-42e6-97b0-710cb27d944d', '2026-01-01 00:00:00+00', 'vm:12112', '2026-11-30 12:19:11.39374+00');
INSERT INTO public.plain_batch VALUES (1, 'failed', 'a', 'failed', 0, '2026-11-30 12:18:41.409122+00', 1, NULL, 'Fail: it has to fail', '2026-11-30 12:18:41.409122+00', '2026-11-30 12:18:43.181291+00');
INSERT INTO public.plain_batch VALUES (2, 'ended-0-again', 'customer 0', 'pending', 0, '2026-11-30 12:18:54.089642+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', NULL);
INSERT INTO public.plain_batch VALUES (3, 'ended-1', 'customer 1', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:54.056855+00');
INSERT INTO public.plain_batch VALUES (4, 'ended-2', 'customer 2', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:54.056855+00');
INSERT INTO public.plain_batch VALUES (5, 'later', 'a', 'pending', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', NULL);
INSERT INTO public.plain_batch VALUES (6, 'cancelled', 'a', 'cancelled', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', '2026-11-30 12:19:08.724597+00');
INSERT INTO public.plain_batch VALUES (7, 'due-3', 'customer 0', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL);
INSERT INTO public.plain_batch VALUES (8, 'due-4-again', 'customer 1', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL);
INSERT INTO public.plain_batch VALUES (9, 'due-5', 'customer 2', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL);
INSERT INTO public.plain_delete VALUES (1, 'failed', 'a', 'failed', 0, '2026-11-30 12:18:41.409122+00', 1, NULL, 'Fail: it has to fail', '2026-11-30 12:18:41.409122+00', '2026-11-30 12:18:42.670965+00');
INSERT INTO public.plain_delete VALUES (3, 'ended-1', 'customer 1', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:53.486477+00');
INSERT INTO public.plain_delete VALUES (4, 'ended-2', 'customer 2', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:53.486477+00');
INSERT INTO public.plain_delete VALUES (2, 'ended-0-again', 'customer 0', 'completed', 0, '2026-11-30 12:18:53.468951+00', 2, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:53.754178+00');
INSERT INTO public.plain_delete VALUES (5, 'later', 'a', 'pending', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', NULL);
INSERT INTO public.plain_delete VALUES (6, 'cancelled', 'a', 'cancelled', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', '2026-11-30 12:19:08.676221+00');
INSERT INTO public.plain_delete VALUES (7, 'due-3', 'customer 0', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL);
INSERT INTO public.plain_delete VALUES (8, 'due-4-again', 'customer 1', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL);
INSERT INTO public.plain_delete VALUES (9, 'due-5', 'customer 2', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL);
INSERT INTO public.plain_update VALUES (1, 'failed', 'a', 'failed', 0, '2026-11-30 12:18:41.409122+00', 1, NULL, 'Fail: it has to fail', '2026-11-30 12:18:41.409122+00', '2026-11-30 12:18:41.864225+00', NULL, NULL, NULL);
INSERT INTO public.plain_update VALUES (3, 'ended-1', 'customer 1', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:52.992532+00', NULL, NULL, NULL);
INSERT INTO public.plain_update VALUES (4, 'ended-2', 'customer 2', 'completed', 0, '2026-11-30 12:18:51.192213+00', 1, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:53.036148+00', NULL, NULL, NULL);
INSERT INTO public.plain_update VALUES (2, 'ended-0-again', 'customer 0', 'completed', 0, '2026-11-30 12:18:52.990633+00', 2, NULL, NULL, '2026-11-30 12:18:51.192213+00', '2026-11-30 12:18:53.050571+00', NULL, NULL, NULL);
INSERT INTO public.plain_update VALUES (5, 'later', 'a', 'pending', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', NULL, NULL, NULL, NULL);
INSERT INTO public.plain_update VALUES (6, 'cancelled', 'a', 'cancelled', 0, '2200-01-01 00:00:00+00', 0, NULL, NULL, '2026-11-30 12:19:08.392772+00', '2026-11-30 12:19:08.624977+00', NULL, NULL, NULL);
INSERT INTO public.plain_update VALUES (8, 'due-4-again', 'customer 1', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL);
INSERT INTO public.plain_update VALUES (9, 'due-5', 'customer 2', 'pending', 0, '2026-11-30 12:19:10.4964+00', 0, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, NULL, NULL, NULL);
INSERT INTO public.plain_update VALUES (7, 'due-3', 'customer 0', 'processing', 0, '2026-11-30 12:19:10.4964+00', 1, NULL, NULL, '2026-11-30 12:19:10.4964+00', NULL, 'e405b231-593c-4798-9ce0-619bddab6785', '2026-01-01 00:00:00+00', 'vm:12112');
INSERT INTO public.sent VALUES ('plain_update', 'ended-0-again');
INSERT INTO public.sent VALUES ('plain_delete', 'ended-0-again');
INSERT INTO public.sent VALUES ('plain_batch', 'ended-0-again');
INSERT INTO public.sent VALUES ('full_update', 'ended-0-again');
INSERT INTO public.sent VALUES ('full_delete', 'ended-0-again');
INSERT INTO public.sent VALUES ('full_batch', 'ended-0-again');
INSERT INTO public.sent VALUES ('ordered', 'ended-0-again');
INSERT INTO public.sent VALUES ('message', 'ended-0-again');
INSERT INTO public.sent VALUES ('import', 'ended-0-again');
INSERT INTO public.sent VALUES ('line', 'ended-0-again.1');
INSERT INTO public.sent VALUES ('line', 'ended-0-again.2');
INSERT INTO public.sent VALUES ('call', 'ended-0-again');
INSERT INTO public.sent VALUES ('plain_update', 'ended-1');
INSERT INTO public.sent VALUES ('plain_delete', 'ended-1');
INSERT INTO public.sent VALUES ('plain_batch', 'ended-1');
INSERT INTO public.sent VALUES ('full_update', 'ended-1');
INSERT INTO public.sent VALUES ('full_delete', 'ended-1');
INSERT INTO public.sent VALUES ('full_batch', 'ended-1');
INSERT INTO public.sent VALUES ('ordered', 'ended-1');
INSERT INTO public.sent VALUES ('message', 'ended-1');
INSERT INTO public.sent VALUES ('import', 'ended-1');
INSERT INTO public.sent VALUES ('line', 'ended-1.1');
INSERT INTO public.sent VALUES ('line', 'ended-1.2');
INSERT INTO public.sent VALUES ('call', 'ended-1');
INSERT INTO public.sent VALUES ('plain_update', 'ended-2');
INSERT INTO public.sent VALUES ('plain_delete', 'ended-2');
INSERT INTO public.sent VALUES ('plain_batch', 'ended-2');
INSERT INTO public.sent VALUES ('full_update', 'ended-2');
INSERT INTO public.sent VALUES ('full_delete', 'ended-2');
INSERT INTO public.sent VALUES ('full_batch', 'ended-2');
INSERT INTO public.sent VALUES ('ordered', 'ended-2');
INSERT INTO public.sent VALUES ('message', 'ended-2');
INSERT INTO public.sent VALUES ('import', 'ended-2');
INSERT INTO public.sent VALUES ('line', 'ended-2.1');
INSERT INTO public.sent VALUES ('line', 'ended-2.2');
INSERT INTO public.sent VALUES ('call', 'ended-2');
INSERT INTO public.sent VALUES ('plain_update', 'due-3');
INSERT INTO public.sent VALUES ('plain_delete', 'due-3');
INSERT INTO public.sent VALUES ('plain_batch', 'due-3');
INSERT INTO public.sent VALUES ('full_update', 'due-3');
INSERT INTO public.sent VALUES ('full_delete', 'due-3');
INSERT INTO public.sent VALUES ('full_batch', 'due-3');
INSERT INTO public.sent VALUES ('ordered', 'due-3');
INSERT INTO public.sent VALUES ('message', 'due-3');
INSERT INTO public.sent VALUES ('import', 'due-3');
INSERT INTO public.sent VALUES ('line', 'due-3.1');
INSERT INTO public.sent VALUES ('line', 'due-3.2');
INSERT INTO public.sent VALUES ('call', 'due-3');
INSERT INTO public.sent VALUES ('plain_update', 'due-4-again');
INSERT INTO public.sent VALUES ('plain_delete', 'due-4-again');
INSERT INTO public.sent VALUES ('plain_batch', 'due-4-again');
INSERT INTO public.sent VALUES ('full_update', 'due-4-again');
INSERT INTO public.sent VALUES ('full_delete', 'due-4-again');
INSERT INTO public.sent VALUES ('full_batch', 'due-4-again');
INSERT INTO public.sent VALUES ('ordered', 'due-4-again');
INSERT INTO public.sent VALUES ('message', 'due-4-again');
INSERT INTO public.sent VALUES ('import', 'due-4-again');
INSERT INTO public.sent VALUES ('line', 'due-4-again.1');
INSERT INTO public.sent VALUES ('line', 'due-4-again.2');
INSERT INTO public.sent VALUES ('call', 'due-4-again');
INSERT INTO public.sent VALUES ('plain_update', 'due-5');
INSERT INTO public.sent VALUES ('plain_delete', 'due-5');
INSERT INTO public.sent VALUES ('plain_batch', 'due-5');
INSERT INTO public.sent VALUES ('full_update', 'due-5');
INSERT INTO public.sent VALUES ('full_delete', 'due-5');
INSERT INTO public.sent VALUES ('full_batch', 'due-5');
INSERT INTO public.sent VALUES ('ordered', 'due-5');
INSERT INTO public.sent VALUES ('message', 'due-5');
INSERT INTO public.sent VALUES ('import', 'due-5');
INSERT INTO public.sent VALUES ('line', 'due-5.1');
INSERT INTO public.sent VALUES ('line', 'due-5.2');
INSERT INTO public.sent VALUES ('call', 'due-5');
INSERT INTO public.sqlaqueue_attempt VALUES (1, 'full_update', '[1]', 1, '2026-11-30 12:18:44.415862+00', '2026-11-30 12:18:44.415906+00', 'vm:12112', 'failed', 'Fail: it has to fail', 'Traceback (most recent call last):
  File "/tmp/w_u/tests/upgrades/program.py", line 234, in fail
    raise Fail("it has to fail")
sqlaqueue.exc.Fail: it has to fail
');
INSERT INTO public.sqlaqueue_attempt VALUES (2, 'full_delete', '[1]', 1, '2026-11-30 12:18:46.161986+00', '2026-11-30 12:18:46.162021+00', 'vm:12112', 'failed', 'Fail: it has to fail', 'Traceback (most recent call last):
  File "/tmp/w_u/tests/upgrades/program.py", line 234, in fail
    raise Fail("it has to fail")
sqlaqueue.exc.Fail: it has to fail
');
INSERT INTO public.sqlaqueue_attempt VALUES (3, 'full_batch', '[1]', 1, '2026-11-30 12:18:48.230062+00', '2026-11-30 12:18:48.230096+00', 'vm:12112', 'failed', 'Fail: it has to fail', 'Traceback (most recent call last):
  File "/tmp/w_u/tests/upgrades/program.py", line 234, in fail
    raise Fail("it has to fail")
sqlaqueue.exc.Fail: it has to fail
');
INSERT INTO public.sqlaqueue_attempt VALUES (4, 'full_update', '[3]', 1, '2026-11-30 12:18:54.690381+00', '2026-11-30 12:18:54.703306+00', 'vm:12112', 'completed', NULL, NULL);
INSERT INTO public.sqlaqueue_attempt VALUES (5, 'full_update', '[4]', 1, '2026-11-30 12:18:54.934251+00', '2026-11-30 12:18:54.935112+00', 'vm:12112', 'completed', NULL, NULL);
INSERT INTO public.sqlaqueue_attempt VALUES (6, 'full_update', '[2]', 1, '2026-11-30 12:18:55.052835+00', '2026-11-30 12:18:55.121905+00', 'vm:12112', 'retried', NULL, 'Traceback (most recent call last):
  File "/tmp/w_u/tests/upgrades/program.py", line 193, in run
    raise Retry(0.05)
sqlaqueue.exc.Retry: retry requested by the handler
');
INSERT INTO public.sqlaqueue_attempt VALUES (7, 'full_update', '[2]', 2, '2026-11-30 12:18:55.301911+00', '2026-11-30 12:18:55.304593+00', 'vm:12112', 'completed', NULL, NULL);
INSERT INTO public.sqlaqueue_attempt VALUES (8, 'full_delete', '[3]', 1, '2026-11-30 12:18:56.531506+00', '2026-11-30 12:18:56.548454+00', 'vm:12112', 'completed', NULL, NULL);
INSERT INTO public.sqlaqueue_attempt VALUES (9, 'full_delete', '[4]', 1, '2026-11-30 12:18:56.872087+00', '2026-11-30 12:18:56.877843+00', 'vm:12112', 'completed', NULL, NULL);
INSERT INTO public.sqlaqueue_attempt VALUES (10, 'full_delete', '[2]', 1, '2026-11-30 12:18:56.957454+00', '2026-11-30 12:18:56.964202+00', 'vm:12112', 'retried', NULL, 'Traceback (most recent call last):
  File "/tmp/w_u/tests/upgrades/program.py", line 193, in run
    raise Retry(0.05)
sqlaqueue.exc.Retry: retry requested by the handler
');
INSERT INTO public.sqlaqueue_attempt VALUES (11, 'full_delete', '[2]', 2, '2026-11-30 12:18:57.028493+00', '2026-11-30 12:18:57.033864+00', 'vm:12112', 'completed', NULL, NULL);
INSERT INTO public.sqlaqueue_attempt VALUES (12, 'full_batch', '[2]', 1, '2026-11-30 12:18:57.702863+00', '2026-11-30 12:18:57.724883+00', 'vm:12112', 'retried', NULL, 'Traceback (most recent call last):
  File "/tmp/w_u/tests/upgrades/program.py", line 193, in run
    raise Retry(0.05)
sqlaqueue.exc.Retry: retry requested by the handler
');
INSERT INTO public.sqlaqueue_attempt VALUES (13, 'full_batch', '[3]', 1, '2026-11-30 12:18:57.972164+00', '2026-11-30 12:18:58.020497+00', 'vm:12112', 'completed', NULL, NULL);
INSERT INTO public.sqlaqueue_attempt VALUES (14, 'full_batch', '[4]', 1, '2026-11-30 12:18:58.021743+00', '2026-11-30 12:18:58.02627+00', 'vm:12112', 'completed', NULL, NULL);
INSERT INTO public.sqlaqueue_attempt VALUES (15, 'full_batch', '[2]', 2, '2026-11-30 12:18:58.031105+00', '2026-11-30 12:18:58.055378+00', 'vm:12112', 'completed', NULL, NULL);
INSERT INTO public.sqlaqueue_consumer VALUES ('1', 'plain_update', 'dead:1', 'dead', 1, '0.1.0', true, '[]', 0, '[]', '2026-01-01 00:00:00+00', '2026-01-01 00:00:00+00', '2026-11-30 12:19:11.404954+00');
INSERT INTO public.sqlaqueue_control VALUES ('plain_batch', '[]', '2026-11-30 12:19:11.445176+00');
INSERT INTO public.sqlaqueue_control VALUES ('sqlaqueue_pause plain_batch', '["the upgrade", "ada"]', '2026-11-30 12:19:11.445176+00');
INSERT INTO public.sqlaqueue_crash_journal VALUES ('b7fe6315-9cc5-49fd-a2f8-764de9a39efa', 'plain_batch', '["2"]', 1, 'dead:1', '2026-11-30 12:19:11.42479+00');
INSERT INTO public.sqlaqueue_dead_letter VALUES ('message', '[1]', '{"id": 1, "key": "failed", "run_at": "2026-11-30T12:18:44.409122+00:00", "attempts": 1, "customer": "a", "priority": 0, "created_at": "2026-11-30T12:18:44.409122+00:00", "last_error": "Fail: it has to fail", "finished_at": null, "max_attempts": null}', 'failed', 'Fail: it has to fail', '2026-11-30 12:18:50.868396+00');
INSERT INTO public.sqlaqueue_message_full_delete VALUES (5, 0, '2200-01-01 00:00:00+00');
INSERT INTO public.sqlaqueue_message_full_delete VALUES (7, 0, '2026-11-30 12:19:10.4964+00');
INSERT INTO public.sqlaqueue_message_full_delete VALUES (8, 0, '2026-11-30 12:19:10.4964+00');
INSERT INTO public.sqlaqueue_message_full_delete VALUES (9, 0, '2026-11-30 12:19:10.4964+00');
INSERT INTO public.sqlaqueue_message_plain_delete VALUES (5, 0, '2200-01-01 00:00:00+00');
INSERT INTO public.sqlaqueue_message_plain_delete VALUES (7, 0, '2026-11-30 12:19:10.4964+00');
INSERT INTO public.sqlaqueue_message_plain_delete VALUES (8, 0, '2026-11-30 12:19:10.4964+00');
INSERT INTO public.sqlaqueue_message_plain_delete VALUES (9, 0, '2026-11-30 12:19:10.4964+00');
INSERT INTO public.sqlaqueue_minute VALUES ('full_batch', 29934018, 0, 0, NULL, NULL, NULL, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.sqlaqueue_minute VALUES ('full_update', 29934018, 0, 0, NULL, 3, 1, 1, NULL, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 4, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 2, 1, NULL, 1, NULL, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.sqlaqueue_minute VALUES ('full_delete', 29934018, 0, 0, NULL, 3, 1, 1, NULL, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1, 3, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1, NULL, 3, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.sqlaqueue_minute VALUES ('full_batch', 29934019, 3, 3, 7, 3, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1, NULL, NULL, NULL, NULL, 3, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1, NULL, NULL, 3, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.sqlaqueue_rate VALUES ('full_update', '/1s', 0, '2026-11-30 12:19:11.17586+00', NULL);
INSERT INTO public.sqlaqueue_schedule VALUES ('ticked', 'ticked', 'Ticked', NULL, '00:00:01', 'UTC', '{"key": "tick"}', NULL, '00:00:00', 1000, '01:00:00', false, NULL, NULL, '2026-11-30 12:19:08+00', '2026-11-30 12:19:09+00', '[4]', NULL, '1.000000|UTC', '2026-11-30 12:19:08.247677+00', NULL, '{"cron": null, "every": 1.0, "model": "Ticked", "queue": "ticked", "jitter": 0.0, "values": {"key": "tick"}, "factory": null, "catch_up": 1000, "timezone": "UTC", "misfire_grace": 3600.0, "skip_unfinished": false}', NULL, '2026-11-30 12:19:04.402901+00');
INSERT INTO public.sqlaqueue_tick VALUES ('ticked', '2026-11-30 12:19:05+00', 'ticked', '[1]', '2026-11-30 12:19:08.373776+00');
INSERT INTO public.sqlaqueue_tick VALUES ('ticked', '2026-11-30 12:19:06+00', 'ticked', '[2]', '2026-11-30 12:19:08.373776+00');
INSERT INTO public.sqlaqueue_tick VALUES ('ticked', '2026-11-30 12:19:07+00', 'ticked', '[3]', '2026-11-30 12:19:08.373776+00');
INSERT INTO public.sqlaqueue_tick VALUES ('ticked', '2026-11-30 12:19:08+00', 'ticked', '[4]', '2026-11-30 12:19:08.373776+00');
INSERT INTO public.ticked VALUES (1, 'tick', 'a', 'pending', 0, '2026-11-30 12:19:05+00', 0, NULL, NULL, '2026-11-30 12:19:07.402901+00', NULL, NULL, NULL, NULL);
INSERT INTO public.ticked VALUES (2, 'tick', 'a', 'pending', 0, '2026-11-30 12:19:06+00', 0, NULL, NULL, '2026-11-30 12:19:07.402901+00', NULL, NULL, NULL, NULL);
INSERT INTO public.ticked VALUES (3, 'tick', 'a', 'pending', 0, '2026-11-30 12:19:07+00', 0, NULL, NULL, '2026-11-30 12:19:07.402901+00', NULL, NULL, NULL, NULL);
INSERT INTO public.ticked VALUES (4, 'tick', 'a', 'pending', 0, '2026-11-30 12:19:08+00', 0, NULL, NULL, '2026-11-30 12:19:07.402901+00', NULL, NULL, NULL, NULL);
SELECT pg_catalog.setval('public.call_id_seq', 6, true);
SELECT pg_catalog.setval('public.full_batch_id_seq', 9, true);
SELECT pg_catalog.setval('public.full_delete_id_seq', 9, true);
SELECT pg_catalog.setval('public.full_update_id_seq', 9, true);
SELECT pg_catalog.setval('public.import_id_seq', 6, true);
SELECT pg_catalog.setval('public.line_id_seq', 12, true);
SELECT pg_catalog.setval('public.message_id_seq', 8, true);
SELECT pg_catalog.setval('public.ordered_id_seq', 9, true);
SELECT pg_catalog.setval('public.plain_batch_id_seq', 9, true);
SELECT pg_catalog.setval('public.plain_delete_id_seq', 9, true);
SELECT pg_catalog.setval('public.plain_update_id_seq', 9, true);
SELECT pg_catalog.setval('public.sqlaqueue_attempt_id_seq', 15, true);
SELECT pg_catalog.setval('public.sqlaqueue_waits_import_id_seq', 19, true);
SELECT pg_catalog.setval('public.ticked_id_seq', 4, true);
ALTER TABLE ONLY public.call
    ADD CONSTRAINT call_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.effect
    ADD CONSTRAINT effect_pkey PRIMARY KEY (queue, key);
ALTER TABLE ONLY public.full_batch
    ADD CONSTRAINT full_batch_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.full_delete
    ADD CONSTRAINT full_delete_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.full_update
    ADD CONSTRAINT full_update_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.import
    ADD CONSTRAINT import_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.line
    ADD CONSTRAINT line_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.message
    ADD CONSTRAINT message_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.ordered
    ADD CONSTRAINT ordered_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.plain_batch
    ADD CONSTRAINT plain_batch_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.plain_delete
    ADD CONSTRAINT plain_delete_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.plain_update
    ADD CONSTRAINT plain_update_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.sent
    ADD CONSTRAINT sent_pkey PRIMARY KEY (queue, key);
ALTER TABLE ONLY public.sqlaqueue_attempt
    ADD CONSTRAINT sqlaqueue_attempt_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.sqlaqueue_consumer
    ADD CONSTRAINT sqlaqueue_consumer_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.sqlaqueue_control
    ADD CONSTRAINT sqlaqueue_control_pkey PRIMARY KEY (queue, key);
ALTER TABLE ONLY public.sqlaqueue_crash_journal
    ADD CONSTRAINT sqlaqueue_crash_journal_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.sqlaqueue_dead_letter
    ADD CONSTRAINT sqlaqueue_dead_letter_pkey PRIMARY KEY (queue, key);
ALTER TABLE ONLY public.sqlaqueue_message_full_delete
    ADD CONSTRAINT sqlaqueue_message_full_delete_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.sqlaqueue_message_plain_delete
    ADD CONSTRAINT sqlaqueue_message_plain_delete_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.sqlaqueue_minute
    ADD CONSTRAINT sqlaqueue_minute_pkey PRIMARY KEY (queue, minute);
ALTER TABLE ONLY public.sqlaqueue_rate
    ADD CONSTRAINT sqlaqueue_rate_pkey PRIMARY KEY (queue, rate, key);
ALTER TABLE ONLY public.sqlaqueue_schedule
    ADD CONSTRAINT sqlaqueue_schedule_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.sqlaqueue_tick
    ADD CONSTRAINT sqlaqueue_tick_pkey PRIMARY KEY (schedule, tick);
ALTER TABLE ONLY public.sqlaqueue_waits_import
    ADD CONSTRAINT sqlaqueue_waits_import_pkey PRIMARY KEY (xact, id);
ALTER TABLE ONLY public.ticked
    ADD CONSTRAINT ticked_pkey PRIMARY KEY (id);
CREATE INDEX ix_call_queue_claim ON public.call USING btree (priority, run_at, id) WHERE ((status)::text = 'pending'::text);
CREATE INDEX ix_call_queue_lease ON public.call USING btree (lease_expires_at) WHERE ((status)::text = 'processing'::text);
CREATE INDEX ix_call_queue_quarantined ON public.call USING btree (priority, run_at, id) WHERE (((status)::text = 'pending'::text) AND (lease_token IS NOT NULL));
CREATE INDEX ix_full_batch_queue_claim ON public.full_batch USING btree (priority, run_at, id) WHERE ((status)::text = 'pending'::text);
CREATE INDEX ix_full_batch_queue_finished ON public.full_batch USING btree (status, finished_at) WHERE ((status)::text = 'failed'::text);
CREATE UNIQUE INDEX ix_full_batch_queue_unique ON public.full_batch USING btree (key) WHERE (((status)::text = 'pending'::text) OR ((status)::text = 'processing'::text));
CREATE INDEX ix_full_delete_queue_claim ON public.full_delete USING btree (priority, run_at, id) WHERE ((status)::text = 'pending'::text);
CREATE INDEX ix_full_delete_queue_finished ON public.full_delete USING btree (status, finished_at) WHERE ((status)::text = 'failed'::text);
CREATE INDEX ix_full_delete_queue_turns ON public.full_delete USING btree (priority, hash_record_extended(ROW(customer), '0'::bigint), run_at, id) WHERE ((status)::text = 'pending'::text);
CREATE UNIQUE INDEX ix_full_delete_queue_unique ON public.full_delete USING btree (key) WHERE (((status)::text = 'pending'::text) OR ((status)::text = 'processing'::text));
CREATE INDEX ix_full_update_queue_claim ON public.full_update USING btree (priority, run_at, id) WHERE ((status)::text = 'pending'::text);
CREATE INDEX ix_full_update_queue_finished ON public.full_update USING btree (status, finished_at) WHERE ((status)::text = 'failed'::text);
CREATE INDEX ix_full_update_queue_lease ON public.full_update USING btree (lease_expires_at) WHERE ((status)::text = 'processing'::text);
CREATE INDEX ix_full_update_queue_quarantined ON public.full_update USING btree (priority, run_at, id) WHERE (((status)::text = 'pending'::text) AND (lease_token IS NOT NULL));
CREATE INDEX ix_full_update_queue_running_customer ON public.full_update USING btree ((
CASE
    WHEN ((status)::text = 'processing'::text) THEN hash_record_extended(ROW(customer), '0'::bigint)
    ELSE NULL::bigint
END)) WHERE (
CASE
    WHEN ((status)::text = 'processing'::text) THEN hash_record_extended(ROW(customer), '0'::bigint)
    ELSE NULL::bigint
END IS NOT NULL);
CREATE INDEX ix_full_update_queue_turns ON public.full_update USING btree (priority, hash_record_extended(ROW(customer), '0'::bigint), run_at, id) WHERE ((status)::text = 'pending'::text);
CREATE UNIQUE INDEX ix_full_update_queue_unique ON public.full_update USING btree (key) WHERE (((status)::text = 'pending'::text) OR ((status)::text = 'processing'::text));
CREATE INDEX ix_import_queue_claim ON public.import USING btree (priority, run_at, id) WHERE ((status)::text = 'pending'::text);
CREATE INDEX ix_import_queue_lease ON public.import USING btree (lease_expires_at) WHERE ((status)::text = 'processing'::text);
CREATE INDEX ix_import_queue_quarantined ON public.import USING btree (priority, run_at, id) WHERE (((status)::text = 'pending'::text) AND (lease_token IS NOT NULL));
CREATE INDEX ix_import_queue_waiting ON public.import USING btree (id) WHERE ((status)::text = 'waiting'::text);
CREATE INDEX ix_line_import_id ON public.line USING btree (import_id);
CREATE INDEX ix_line_queue_claim ON public.line USING btree (priority, run_at, id) WHERE ((status)::text = 'pending'::text);
CREATE INDEX ix_line_queue_lease ON public.line USING btree (lease_expires_at) WHERE ((status)::text = 'processing'::text);
CREATE INDEX ix_line_queue_quarantined ON public.line USING btree (priority, run_at, id) WHERE (((status)::text = 'pending'::text) AND (lease_token IS NOT NULL));
CREATE INDEX ix_message_queue_claim ON public.message USING btree (priority, run_at, id);
CREATE INDEX ix_ordered_queue_claim ON public.ordered USING btree (priority, run_at, id) WHERE ((status)::text = 'pending'::text);
CREATE INDEX ix_ordered_queue_lease ON public.ordered USING btree (lease_expires_at) WHERE ((status)::text = 'processing'::text);
CREATE INDEX ix_ordered_queue_order ON public.ordered USING btree (hash_record_extended(ROW(customer), '0'::bigint), id) WHERE (((status)::text = 'pending'::text) OR ((status)::text = 'processing'::text) OR ((status)::text = 'failed'::text));
CREATE INDEX ix_ordered_queue_parts ON public.ordered USING btree (priority, hash_record_extended(ROW(customer), '0'::bigint), id) WHERE ((status)::text = 'pending'::text);
CREATE INDEX ix_ordered_queue_quarantined ON public.ordered USING btree (priority, run_at, id) WHERE (((status)::text = 'pending'::text) AND (lease_token IS NOT NULL));
CREATE INDEX ix_ordered_queue_running_customer ON public.ordered USING btree ((
CASE
    WHEN ((status)::text = 'processing'::text) THEN hash_record_extended(ROW(customer), '0'::bigint)
    ELSE NULL::bigint
END)) WHERE (
CASE
    WHEN ((status)::text = 'processing'::text) THEN hash_record_extended(ROW(customer), '0'::bigint)
    ELSE NULL::bigint
END IS NOT NULL);
CREATE INDEX ix_plain_batch_queue_claim ON public.plain_batch USING btree (priority, run_at, id) WHERE ((status)::text = 'pending'::text);
CREATE INDEX ix_plain_update_queue_claim ON public.plain_update USING btree (priority, run_at, id) WHERE ((status)::text = 'pending'::text);
CREATE INDEX ix_plain_update_queue_lease ON public.plain_update USING btree (lease_expires_at) WHERE ((status)::text = 'processing'::text);
CREATE INDEX ix_plain_update_queue_quarantined ON public.plain_update USING btree (priority, run_at, id) WHERE (((status)::text = 'pending'::text) AND (lease_token IS NOT NULL));
CREATE INDEX ix_sqlaqueue_attempt_ended ON public.sqlaqueue_attempt USING btree (queue, ended_at);
CREATE INDEX ix_sqlaqueue_attempt_job ON public.sqlaqueue_attempt USING btree (queue, key);
CREATE INDEX ix_sqlaqueue_message_plain_delete_claim ON public.sqlaqueue_message_plain_delete USING btree (priority, run_at, id);
CREATE INDEX ix_sqlaqueue_tick_job ON public.sqlaqueue_tick USING btree (queue, key);
CREATE INDEX ix_ticked_queue_claim ON public.ticked USING btree (priority, run_at, id) WHERE ((status)::text = 'pending'::text);
CREATE INDEX ix_ticked_queue_lease ON public.ticked USING btree (lease_expires_at) WHERE ((status)::text = 'processing'::text);
CREATE INDEX ix_ticked_queue_quarantined ON public.ticked USING btree (priority, run_at, id) WHERE (((status)::text = 'pending'::text) AND (lease_token IS NOT NULL));
CREATE TRIGGER sqlaqueue_freed_delete_3772413f AFTER DELETE ON public.full_delete FOR EACH ROW WHEN (((old.status)::text = 'pending'::text)) EXECUTE FUNCTION public.sqlaqueue_freed_full_delete();
CREATE TRIGGER sqlaqueue_freed_delete_382adbae AFTER DELETE ON public.full_update FOR EACH ROW WHEN (((old.status)::text = 'processing'::text)) EXECUTE FUNCTION public.sqlaqueue_freed_full_update();
CREATE TRIGGER sqlaqueue_freed_delete_e3a1a7e5 AFTER DELETE ON public.ordered FOR EACH ROW WHEN ((((old.status)::text = 'pending'::text) OR ((old.status)::text = 'processing'::text) OR ((old.status)::text = 'failed'::text))) EXECUTE FUNCTION public.sqlaqueue_freed_ordered();
CREATE TRIGGER sqlaqueue_freed_update_0473f8cc AFTER UPDATE ON public.ordered FOR EACH ROW WHEN (((((old.status)::text = 'pending'::text) OR ((old.status)::text = 'processing'::text) OR ((old.status)::text = 'failed'::text)) AND ((old.status)::text IS DISTINCT FROM (new.status)::text))) EXECUTE FUNCTION public.sqlaqueue_freed_ordered();
CREATE TRIGGER sqlaqueue_freed_update_2355a12b AFTER UPDATE ON public.full_delete FOR EACH ROW WHEN ((((old.status)::text = 'pending'::text) AND (((old.status)::text IS DISTINCT FROM (new.status)::text) OR (old.attempts IS DISTINCT FROM new.attempts) OR (old.run_at IS DISTINCT FROM new.run_at)))) EXECUTE FUNCTION public.sqlaqueue_freed_full_delete();
CREATE TRIGGER sqlaqueue_freed_update_a4aa1e17 AFTER UPDATE ON public.full_update FOR EACH ROW WHEN ((((old.status)::text = 'processing'::text) AND ((old.status)::text IS DISTINCT FROM (new.status)::text))) EXECUTE FUNCTION public.sqlaqueue_freed_full_update();
CREATE TRIGGER sqlaqueue_message_delete AFTER DELETE ON public.full_delete REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_message_full_delete_sync();
CREATE TRIGGER sqlaqueue_message_delete AFTER DELETE ON public.plain_delete REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_message_plain_delete_sync();
CREATE TRIGGER sqlaqueue_message_insert AFTER INSERT ON public.full_delete REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_message_full_delete_sync();
CREATE TRIGGER sqlaqueue_message_insert AFTER INSERT ON public.plain_delete REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_message_plain_delete_sync();
CREATE TRIGGER sqlaqueue_message_truncate AFTER TRUNCATE ON public.full_delete FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_message_full_delete_sync();
CREATE TRIGGER sqlaqueue_message_truncate AFTER TRUNCATE ON public.plain_delete FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_message_plain_delete_sync();
CREATE TRIGGER sqlaqueue_message_update AFTER UPDATE ON public.full_delete REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_message_full_delete_sync();
CREATE TRIGGER sqlaqueue_message_update AFTER UPDATE ON public.plain_delete REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_message_plain_delete_sync();
CREATE TRIGGER sqlaqueue_schedule_insert AFTER INSERT ON public.sqlaqueue_schedule FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_schedule_changed();
CREATE TRIGGER sqlaqueue_schedule_update_8bdf96a6 AFTER UPDATE ON public.sqlaqueue_schedule FOR EACH ROW WHEN ((((((((((old.queue IS DISTINCT FROM new.queue) OR (old.model IS DISTINCT FROM new.model)) OR (old.cron IS DISTINCT FROM new.cron)) OR (old.every IS DISTINCT FROM new.every)) OR (old.timezone IS DISTINCT FROM new.timezone)) OR (old."values" IS DISTINCT FROM new."values")) OR (old.factory IS DISTINCT FROM new.factory)) OR (old.paused_at IS DISTINCT FROM new.paused_at)) OR ((new.run_requested_at IS NOT NULL) AND (old.run_requested_at IS DISTINCT FROM new.run_requested_at)) OR ((new.next_tick IS DISTINCT FROM old.next_tick) AND (NOT (new.last_tick IS DISTINCT FROM old.last_tick))))) EXECUTE FUNCTION public.sqlaqueue_schedule_changed();
CREATE CONSTRAINT TRIGGER sqlaqueue_waits_apply AFTER INSERT ON public.sqlaqueue_waits_import DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.sqlaqueue_waits_import_apply();
CREATE TRIGGER sqlaqueue_waits_cancel_801f6a3e AFTER UPDATE ON public.import FOR EACH ROW WHEN ((((new.status)::text = 'cancelled'::text) AND (((old.status)::text = 'cancelled'::text) IS NOT TRUE))) EXECUTE FUNCTION public.sqlaqueue_waits_import_cancel();
CREATE TRIGGER sqlaqueue_waits_import_lines_delete AFTER DELETE ON public.line REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_waits_import_lines_changed();
CREATE TRIGGER sqlaqueue_waits_import_lines_insert AFTER INSERT ON public.line REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_waits_import_lines_changed();
CREATE TRIGGER sqlaqueue_waits_import_lines_update AFTER UPDATE ON public.line REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_waits_import_lines_changed();
CREATE TRIGGER sqlaqueue_waits_insert AFTER INSERT ON public.import REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_waits_import_look();
CREATE TRIGGER sqlaqueue_waits_state_c2884926 BEFORE INSERT OR UPDATE ON public.import FOR EACH ROW WHEN (((((new.status)::text = 'waiting'::text) OR ((new.status)::text = 'pending'::text)) AND (((new.status)::text = 'waiting'::text) IS DISTINCT FROM (COALESCE(new.waits_for_count, 0) > 0)))) EXECUTE FUNCTION public.sqlaqueue_waits_import_state();
CREATE TRIGGER sqlaqueue_waits_update_8f9136e8 AFTER UPDATE ON public.import FOR EACH ROW WHEN ((((((new.status)::text = 'waiting'::text) OR ((new.status)::text = 'pending'::text)) AND ((((old.status)::text = 'waiting'::text) OR ((old.status)::text = 'pending'::text)) IS NOT TRUE)) OR (old.id IS DISTINCT FROM new.id))) EXECUTE FUNCTION public.sqlaqueue_waits_import_look();
CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON public.call REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_wake_call();
CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON public.full_batch REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_wake_full_batch();
CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON public.full_delete REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_wake_full_delete();
CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON public.full_update REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_wake_full_update();
CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON public.import REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_wake_import();
CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON public.line REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_wake_line();
CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON public.message REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_wake_message();
CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON public.ordered REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_wake_ordered();
CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON public.plain_batch REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_wake_plain_batch();
CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON public.plain_delete REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_wake_plain_delete();
CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON public.plain_update REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_wake_plain_update();
CREATE TRIGGER sqlaqueue_wake_insert AFTER INSERT ON public.ticked REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.sqlaqueue_wake_ticked();
CREATE TRIGGER sqlaqueue_wake_update_22793158 AFTER UPDATE ON public.call FOR EACH ROW WHEN ((((new.status)::text = 'pending'::text) AND ((((old.status)::text = 'pending'::text) IS NOT TRUE) OR (old.run_at IS DISTINCT FROM new.run_at)))) EXECUTE FUNCTION public.sqlaqueue_wake_call();
CREATE TRIGGER sqlaqueue_wake_update_22793158 AFTER UPDATE ON public.full_batch FOR EACH ROW WHEN ((((new.status)::text = 'pending'::text) AND ((((old.status)::text = 'pending'::text) IS NOT TRUE) OR (old.run_at IS DISTINCT FROM new.run_at)))) EXECUTE FUNCTION public.sqlaqueue_wake_full_batch();
CREATE TRIGGER sqlaqueue_wake_update_22793158 AFTER UPDATE ON public.full_delete FOR EACH ROW WHEN ((((new.status)::text = 'pending'::text) AND ((((old.status)::text = 'pending'::text) IS NOT TRUE) OR (old.run_at IS DISTINCT FROM new.run_at)))) EXECUTE FUNCTION public.sqlaqueue_wake_full_delete();
CREATE TRIGGER sqlaqueue_wake_update_22793158 AFTER UPDATE ON public.full_update FOR EACH ROW WHEN ((((new.status)::text = 'pending'::text) AND ((((old.status)::text = 'pending'::text) IS NOT TRUE) OR (old.run_at IS DISTINCT FROM new.run_at)))) EXECUTE FUNCTION public.sqlaqueue_wake_full_update();
CREATE TRIGGER sqlaqueue_wake_update_22793158 AFTER UPDATE ON public.import FOR EACH ROW WHEN ((((new.status)::text = 'pending'::text) AND ((((old.status)::text = 'pending'::text) IS NOT TRUE) OR (old.run_at IS DISTINCT FROM new.run_at)))) EXECUTE FUNCTION public.sqlaqueue_wake_import();
CREATE TRIGGER sqlaqueue_wake_update_22793158 AFTER UPDATE ON public.line FOR EACH ROW WHEN ((((new.status)::text = 'pending'::text) AND ((((old.status)::text = 'pending'::text) IS NOT TRUE) OR (old.run_at IS DISTINCT FROM new.run_at)))) EXECUTE FUNCTION public.sqlaqueue_wake_line();
CREATE TRIGGER sqlaqueue_wake_update_22793158 AFTER UPDATE ON public.ordered FOR EACH ROW WHEN ((((new.status)::text = 'pending'::text) AND ((((old.status)::text = 'pending'::text) IS NOT TRUE) OR (old.run_at IS DISTINCT FROM new.run_at)))) EXECUTE FUNCTION public.sqlaqueue_wake_ordered();
CREATE TRIGGER sqlaqueue_wake_update_22793158 AFTER UPDATE ON public.plain_batch FOR EACH ROW WHEN ((((new.status)::text = 'pending'::text) AND ((((old.status)::text = 'pending'::text) IS NOT TRUE) OR (old.run_at IS DISTINCT FROM new.run_at)))) EXECUTE FUNCTION public.sqlaqueue_wake_plain_batch();
CREATE TRIGGER sqlaqueue_wake_update_22793158 AFTER UPDATE ON public.plain_delete FOR EACH ROW WHEN ((((new.status)::text = 'pending'::text) AND ((((old.status)::text = 'pending'::text) IS NOT TRUE) OR (old.run_at IS DISTINCT FROM new.run_at)))) EXECUTE FUNCTION public.sqlaqueue_wake_plain_delete();
CREATE TRIGGER sqlaqueue_wake_update_22793158 AFTER UPDATE ON public.plain_update FOR EACH ROW WHEN ((((new.status)::text = 'pending'::text) AND ((((old.status)::text = 'pending'::text) IS NOT TRUE) OR (old.run_at IS DISTINCT FROM new.run_at)))) EXECUTE FUNCTION public.sqlaqueue_wake_plain_update();
CREATE TRIGGER sqlaqueue_wake_update_22793158 AFTER UPDATE ON public.ticked FOR EACH ROW WHEN ((((new.status)::text = 'pending'::text) AND ((((old.status)::text = 'pending'::text) IS NOT TRUE) OR (old.run_at IS DISTINCT FROM new.run_at)))) EXECUTE FUNCTION public.sqlaqueue_wake_ticked();
CREATE TRIGGER sqlaqueue_wake_update_3a4b41a2 AFTER UPDATE ON public.message FOR EACH ROW WHEN ((true AND (old.run_at IS DISTINCT FROM new.run_at))) EXECUTE FUNCTION public.sqlaqueue_wake_message();
ALTER TABLE ONLY public.line
    ADD CONSTRAINT line_import_id_fkey FOREIGN KEY (import_id) REFERENCES public.import(id);
