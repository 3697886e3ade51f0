"""Faults of tables, columns, indexes, triggers and functions, and missing rights."""

import enum
import re
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, Schedule
from sqlaqueue.admin import Finding, QueueAdmin, doctor
from sqlaqueue.admin.doctor.server import check_altered_objects, check_functions, check_indexes, check_triggers
from sqlaqueue.cli.output import DatabaseError, command_errors
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.checks_of import checks_of
from tests.doctor.conftest import Patient, apply, mended, new_role, plain_engine
from tests.doctor.models import MODELS, Email, Entry, Export, Import, Letter, Task
from tests.models import new_base
from tests.programs import wait_until
from tests.servers import Server


def test_missing_tables_end_the_examination_of_a_queue(patient: Patient) -> None:
    patient.execute("DROP TABLE sqlaqueue_crash_journal, sqlaqueue_message_letter")
    found = patient.findings(Email, Letter)
    assert [(each.code, each.queue, each.severity) for each in found] == [("missing_table", "letter", "critical")] * 2
    assert {each.facts["table"] for each in found} == {"sqlaqueue_crash_journal", "sqlaqueue_message_letter"}
    for finding in found:
        assert finding.facts["table"] in finding.summary
        patient.repair(finding.fixes[1])
    assert patient.findings(Email, Letter) == []


def test_missing_tables_of_schedules_do_not_keep_jobs_from_running(patient: Patient) -> None:
    base = new_base()

    class Parcel(QueueMixin, base):
        __tablename__ = "parcel"
        id: Mapped[int] = mapped_column(primary_key=True)

    Schedule("hourly", Parcel, every=3600)
    base.metadata.create_all(patient.engine)
    patient.execute("DROP TABLE sqlaqueue_schedule, sqlaqueue_tick")
    found = patient.findings(Parcel)
    assert {each.facts["table"] for each in found} == {"sqlaqueue_schedule", "sqlaqueue_tick"}
    assert {each.consequence for each in found} == {
        "No schedule is fired: Consumers with schedules= and Schedulers do not start."
    }
    with Session(patient.engine) as session:
        session.add(Parcel())
        session.commit()
    assert Consumer(Parcel, lambda session, parcel: None, sessionmaker(patient.engine)).drain() == 1


def test_a_table_in_another_schema(patient: Patient) -> None:
    patient.execute("CREATE SCHEMA elsewhere", "ALTER TABLE sqlaqueue_control SET SCHEMA elsewhere")
    finding = patient.find("missing_table", Email)
    assert "it is in the schema elsewhere, to which the search_path does not lead" in finding.summary
    assert finding.fixes[0].startswith("alembic ")


def test_a_database_without_any_table_may_be_the_wrong_one(patient: Patient, server: Server) -> None:
    with server.database() as empty:
        engine = plain_engine(empty.url())
        with Session(engine) as session:
            (finding,) = doctor(session, Email)
        assert (finding.code, finding.severity) == ("missing_table", "critical")
        assert finding.summary.startswith(f"The database {empty.name} has no table of this queue")
        assert finding.summary.endswith("Is it the right database?")
        apply(empty.dsn, finding.fixes[1])
        with Session(engine) as session:
            assert doctor(session, Email) == []


def test_a_lost_default(patient: Patient) -> None:
    patient.execute("ALTER TABLE email ALTER COLUMN status DROP DEFAULT, ALTER COLUMN run_at DROP DEFAULT")
    found = [each for each in patient.findings(Email) if each.code == "missing_default"]
    assert [(each.severity, each.facts["column"]) for each in found] == [
        ("critical", "email.status"),
        ("critical", "email.run_at"),
    ]
    for finding in found:
        patient.repair(finding.fixes[0])
    assert patient.findings(Email) == []
    assert patient.execute("INSERT INTO email (id) VALUES (1) RETURNING status, run_at IS NULL") == [("pending", False)]


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        ("'pending', 'completed', 'failed', 'cancelled'", ["processing"]),
        ("'pending', 'processing', 'completed'", ["failed", "cancelled"]),
    ],
)
def test_a_constraint_that_refuses_a_status(patient: Patient, allowed: str, refused: list[str]) -> None:
    patient.execute(f'ALTER TABLE email ADD CONSTRAINT "a status" CHECK (status IN ({allowed}))')
    found = [each for each in patient.findings(Email) if each.code == "refused_status"]
    assert sorted(each.facts["state"] for each in found) == sorted(refused)
    for finding in found:
        assert finding.severity == ("warning" if finding.facts["state"] == "cancelled" else "critical")
        assert "the CHECK constraint a status refuses the status of" in finding.summary
    for _ in refused:
        first = next(each for each in patient.findings(Email) if each.code == "refused_status")
        patient.repair(first.fixes[0])
    assert patient.findings(Email) == []
    with pytest.raises(sa.exc.IntegrityError):
        patient.execute("INSERT INTO email (status) VALUES ('other')")


def test_constraints_that_refuse_no_status(patient: Patient) -> None:
    patient.execute(
        "ALTER TABLE email ADD CHECK (status LIKE '%%e%%'), ADD CHECK (status <> 'other'), "
        "ADD CHECK (status <> 'processing' OR claimed_by IS NOT NULL)",
        "ALTER TABLE \"Entry of a book\" ADD CHECK (status <> 'processing')",
    )
    assert patient.findings(Email, Entry) == []


def test_a_type_that_lacks_a_status(patient: Patient) -> None:
    base = new_base()

    class Parcel(QueueMixin, base):
        __tablename__ = "parcel"
        __queue__ = QueueConfig(columns={"status": "status"})
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[State] = mapped_column(sa.Enum(State, name="parcel_state"))

    base.metadata.create_all(patient.engine)
    assert patient.findings(Parcel) == []
    patient.execute("ALTER TYPE parcel_state RENAME VALUE 'failed' TO 'broken'")
    finding = patient.find("refused_status", Parcel)
    assert finding.summary == "In parcel the type of the column status refuses the status of failed jobs."
    assert finding.fixes == ("ALTER TYPE parcel_state ADD VALUE 'failed';",)
    # What a command of the CLI says, which the user has given no value.
    said = 'the type of the status column of Parcel lacks a value: invalid input value for enum parcel_state: "failed"'
    with (
        pytest.raises(DatabaseError, match=re.escape(said)),
        command_errors(spec_of(Parcel)),
        Session(patient.engine) as session,
    ):
        QueueAdmin(session, Parcel).stats()
    patient.repair(finding.fixes[0])
    assert patient.findings(Parcel) == []
    patient.execute("ALTER TABLE parcel ADD CHECK (status <> 'processing')")
    patient.repaired("refused_status", Parcel)


class State(enum.Enum):
    pending = 1
    processing = 2
    completed = 3
    failed = 4
    cancelled = 5


def test_a_missing_column(patient: Patient) -> None:
    patient.execute("ALTER TABLE email DROP COLUMN lease_token")
    finding = patient.find("missing_column", Email)
    assert "email.lease_token" in finding.summary
    patient.repair(finding.fixes[1])
    # The indexes that had it are dropped with it.
    assert patient.healed("missing_index", Email).facts["index"] == "ix_email_queue_quarantined"


def test_schemas_that_the_search_path_splits(patient: Patient) -> None:
    patient.execute(
        "CREATE SCHEMA first",
        "CREATE TABLE first.sqlaqueue_control (LIKE public.sqlaqueue_control INCLUDING ALL)",
        f'ALTER DATABASE "{patient.database.name}" SET search_path = first, public',
    )
    finding = patient.repaired("split_schemas", Email)
    assert "sqlaqueue_control in first" in finding.summary
    assert "schema public" in finding.summary


THOROUGH = pytest.mark.thorough
INVALID = "UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{}'::regclass"
INDEXES = [
    (Email, "ix_email_queue_claim", "warning"),
    pytest.param(Email, "ix_email_queue_lease", "warning", marks=THOROUGH),
    (Email, "ix_email_queue_unique", "critical"),
    pytest.param(Email, "ix_email_queue_finished", "warning", marks=THOROUGH),
    (Letter, "ix_sqlaqueue_message_letter_claim", "warning"),
    pytest.param(Entry, "ix_Entry of a book_queue_claim", "warning", marks=THOROUGH),
    pytest.param(Task, "ix_task_queue_claim", "warning", marks=THOROUGH),
    (Export, "ix_export_queue_running_customer_id", "warning"),
    pytest.param(Export, "ix_export_queue_order", "warning", marks=THOROUGH),
    pytest.param(Import, "ix_import_queue_turns", "warning", marks=THOROUGH),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "name", "severity"), INDEXES)
def test_a_missing_index(patient: Patient, model: Any, name: str, severity: str) -> None:
    patient.execute(f'DROP INDEX "{name}"')
    finding = patient.healed("missing_index", model)
    assert name in finding.summary
    assert finding.severity == severity
    assert " CONCURRENTLY " in finding.fixes[0]


def claim_indexes(*models: Any) -> list[Any]:
    return [(model, str(index.name)) for model in models for index in spec_of(model).claim_indexes]


@pytest.mark.few(5)
@pytest.mark.parametrize(("model", "name"), claim_indexes(Email, Entry, Export, Import))
def test_each_index_of_a_claim_is_missed_everywhere(patient: Patient, model: Any, name: str) -> None:
    """Those beside it begin with the same columns, and have other rows or something between the columns."""
    patient.execute(f'DROP INDEX "{name}"')
    assert mended(patient, "missing_index", model, check_indexes).facts["index"] == name
    patient.execute(f'DROP INDEX "{name}"')
    with Session(patient.engine) as session:
        stats = QueueAdmin(session, model).stats()
        assert stats.missing_indexes == [name]
        advice = checks_of(session.connection()).missing_index_advice(session.connection(), spec_of(model))
    assert advice is not None
    assert f"CREATE INDEX CONCURRENTLY {name if name.islower() else chr(34) + name + chr(34)} ON" in advice


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("definition", "serves"),
    [
        ("(priority, run_at, id)", True),
        ("(priority, run_at, id, customer_id)", True),
        ("(priority, run_at, id) WHERE status = 'pending'", True),
        ("(priority, run_at, id) WHERE customer_id = 1", False),
        ("(priority, abs(customer_id), run_at, id) WHERE status = 'pending'", False),
        ("(priority, run_at)", False),
        ("(priority DESC, run_at, id)", False),
    ],
)
def test_an_index_of_the_application_serves_claims(patient: Patient, definition: str, *, serves: bool) -> None:
    patient.execute("DROP INDEX ix_export_queue_claim", f"CREATE INDEX mine ON export {definition}")
    found = [each.code for each in patient.findings(Export)]
    assert found == ([] if serves else ["missing_index"])


@pytest.mark.parametrize("unique", ["", "UNIQUE"])
def test_an_invalid_index_of_the_application(patient: Patient, unique: str) -> None:
    patient.execute(f'CREATE {unique} INDEX mine ON email ("to")', INVALID.format("mine"))
    finding = patient.repaired("invalid_index", Email)
    assert finding.severity == "warning"
    assert finding.summary.startswith("The index mine of email is invalid")
    assert ("equal values" in finding.consequence) is bool(unique)


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "name", "severity"), INDEXES)
def test_an_invalid_index(patient: Patient, model: Any, name: str, severity: str) -> None:
    patient.execute(INVALID.format(f'"{name}"'))
    finding = patient.healed("invalid_index", model)
    assert name in finding.summary
    assert finding.severity == severity


def test_an_invalid_unique_index_of_jobs_that_are_duplicates(patient: Patient) -> None:
    patient.execute("DROP INDEX ix_email_queue_unique")
    create = patient.find("missing_index", Email).fixes[0]
    patient.add(Email(id=1, to="ada"), Email(id=2, to="ada"))
    with pytest.raises(psycopg.errors.UniqueViolation):
        patient.repair(create)
    finding = patient.find("invalid_index", Email)
    assert "delete one of the jobs that have this key" in finding.consequence
    patient.execute("DELETE FROM email WHERE id = 2")
    # A failed attempt leaves an index of its own behind.
    patient.repair(finding.fixes[0])
    assert patient.codes(Email) == []


def test_what_a_failed_reindex_leaves_behind(patient: Patient) -> None:
    patient.execute("DROP INDEX ix_email_queue_unique")
    create = patient.find("missing_index", Email).fixes[0]
    patient.add(Email(id=1, to="ada"), Email(id=2, to="ada"))
    for fix in (create, "REINDEX INDEX CONCURRENTLY ix_email_queue_unique;"):
        with pytest.raises(psycopg.errors.UniqueViolation):
            patient.repair(fix)
    assert patient.repaired("leftover_index", Email).facts["index"] == "ix_email_queue_unique_ccnew"


OF_EMAIL = "ix_email_queue_claim"
ALTERED = [
    (Email, OF_EMAIL, "email (run_at, priority, id) WHERE status = 'pending'"),
    pytest.param(Email, OF_EMAIL, "email (priority, run_at, id) WHERE status = 'processing'", marks=THOROUGH),
    pytest.param(Email, OF_EMAIL, "email (priority, run_at, id)", marks=THOROUGH),
    pytest.param(Email, OF_EMAIL, "email (priority, run_at DESC, id) WHERE status = 'pending'", marks=THOROUGH),
    pytest.param(Email, OF_EMAIL, "email USING hash (run_at)", marks=THOROUGH),
    (Letter, "ix_sqlaqueue_message_letter_claim", "sqlaqueue_message_letter (id)"),
    (Entry, "ix_Entry of a book_queue_claim", "\"Entry of a book\" (priority, run_at) WHERE status = 'pending'"),
    (Export, "ix_export_queue_running_customer_id", "export (customer_id)"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "name", "definition"), ALTERED)
def test_an_altered_index(patient: Patient, model: Any, name: str, definition: str) -> None:
    patient.execute(f'DROP INDEX "{name}"', f'CREATE INDEX "{name}" ON {definition}')
    finding = patient.healed("altered_index", model)
    assert name in finding.summary
    assert finding.severity == "warning"


@pytest.mark.parametrize("definition", ['UNIQUE INDEX {} ON email ("to")', 'INDEX {} ON email ("to")'])
def test_an_altered_unique_index(patient: Patient, definition: str) -> None:
    name = "ix_email_queue_unique"
    patient.execute(f"DROP INDEX {name}", f"CREATE {definition.format(name)}")
    finding = patient.healed("altered_index", Email)
    assert finding.severity == "critical"


def test_an_index_that_is_written_in_another_way_is_not_altered(patient: Patient) -> None:
    patient.execute(
        "DROP INDEX ix_email_queue_claim",
        "CREATE INDEX ix_email_queue_claim ON email (priority, run_at, id) WHERE status IN ('pending'::varchar)",
    )
    assert patient.findings(Email) == []


def test_an_index_of_another_name_serves_claims(patient: Patient) -> None:
    patient.execute("ALTER INDEX ix_email_queue_claim RENAME TO of_my_own")
    assert patient.findings(Email) == []


def test_an_index_that_is_being_built(patient: Patient) -> None:
    patient.execute("DROP INDEX ix_email_queue_claim")
    create = patient.find("missing_index", Email).fixes[0]
    with patient.database.connect() as holder:
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE email IN ROW EXCLUSIVE MODE")
        building = threading.Thread(target=patient.repair, args=(create,))
        building.start()
        try:
            wait_until(lambda: patient.execute("SELECT FROM pg_stat_progress_create_index WHERE index_relid > 0"))
            pid = holder.info.backend_pid
            finding = patient.find("index_building", Email)
            assert finding.severity == "notice"
            waits = rf", and waits for a transaction, which has been open for \d+ s: Session {pid} \("
            assert re.search(waits, finding.summary)
            assert finding.summary.endswith("; its last statement: LOCK email.")
            assert finding.fixes[0].endswith(f"pg_terminate_backend({pid});")
            hanging = patient.find("index_building", Email, transaction_open=timedelta(0))
            assert hanging.severity == "warning"
        finally:
            holder.execute("COMMIT")
            building.join()
    assert patient.findings(Email) == []


@pytest.mark.parametrize(
    ("model", "trigger", "severity"),
    [(Email, "sqlaqueue_wake_insert", "warning"), (Letter, "sqlaqueue_message_insert", "critical")],
)
def test_a_trigger_that_does_not_fire(patient: Patient, model: Any, trigger: str, severity: str) -> None:
    table = model.__tablename__
    for how in ("DISABLE", "ENABLE REPLICA"):
        patient.execute(f"ALTER TABLE {table} {how} TRIGGER {trigger}")
        finding = mended(patient, "disabled_trigger", model, check_triggers)
        assert trigger in finding.summary
        assert finding.severity == severity
    patient.execute(f"DROP TRIGGER {trigger} ON {table}")
    finding = patient.healed("missing_trigger", model, fix=1)
    assert trigger in finding.summary
    assert finding.severity == severity


def test_all_triggers_are_disabled(patient: Patient) -> None:
    patient.execute("ALTER TABLE letter DISABLE TRIGGER USER")
    found = [each for each in patient.findings(Letter) if each.code == "disabled_trigger"]
    assert len(found) > 4
    for finding in found:
        patient.repair(finding.fixes[0])
    assert patient.findings(Letter) == []


def test_a_missing_trigger_function(patient: Patient) -> None:
    patient.execute("DROP FUNCTION sqlaqueue_message_letter_sync CASCADE")
    codes = patient.codes(Letter)
    assert codes == ["missing_trigger"] * 4 + ["missing_function"]
    for finding in patient.findings(Letter):
        patient.repair(finding.fixes[1])
    assert patient.findings(Email, Letter) == []


def test_a_missing_function_of_claims(patient: Patient) -> None:
    name = patient.execute("SELECT proname FROM pg_proc WHERE proname ~ '^sqlaqueue_export.*head|^sqlaqueue_.*head'")[
        0
    ][0]
    patient.execute(f"DROP FUNCTION {name}")
    finding = patient.repaired("missing_function", Export, fix=1)
    assert name in finding.summary
    assert finding.severity == "critical"


def test_functions_of_other_versions(patient: Patient) -> None:
    name = "sqlaqueue_wake_email"
    patient.execute(f"COMMENT ON FUNCTION {name}() IS 'sqlaqueue, version 1'")
    assert name in patient.repaired("outdated_function", Email, fix=1).summary
    patient.execute(f"COMMENT ON FUNCTION {name}() IS 'sqlaqueue, version 999'")
    finding = patient.find("newer_function", Email)
    assert "is of version 999" in finding.summary
    assert finding.facts["found"] == 999


@pytest.mark.parametrize(
    ("model", "name", "severity"),
    [(Email, "sqlaqueue_wake_email", "warning"), (Letter, "sqlaqueue_message_letter_sync", "critical")],
)
def test_a_function_that_was_changed_by_hand(patient: Patient, model: Any, name: str, severity: str) -> None:
    """Its comment still has the version."""
    source = patient.execute(f"SELECT pg_get_functiondef('{name}'::regproc)")[0][0]
    empty = source[: source.index("BEGIN")] + "BEGIN RETURN NULL; END " + source[source.rindex("$function$") :]
    for changed in (
        empty,
        f"{source}; ALTER FUNCTION {name}() SET search_path = pg_temp",
        f"{source}; ALTER FUNCTION {name}() COST 7",
    ):
        patient.execute(*changed.split("; ALTER", 1)[:1], *(f"ALTER{rest}" for rest in changed.split("; ALTER", 1)[1:]))
        finding = mended(patient, "altered_function", model, check_functions, check_altered_objects)
        assert name in finding.summary
        assert finding.severity == severity
    assert patient.findings(model) == []


def test_a_fix_that_was_copied_with_its_indentation(patient: Patient) -> None:
    """The command indents what it prints, and the server stores the text of a function as it is."""
    patient.execute(
        "CREATE OR REPLACE FUNCTION sqlaqueue_message_letter_sync() RETURNS trigger LANGUAGE plpgsql "
        "AS 'BEGIN RETURN NULL; END'"
    )
    fix = patient.find("altered_function", Letter).fixes[0]
    patient.repair("\n".join(f"    {line}" for line in fix.splitlines()))
    assert patient.findings(Letter) == []


def test_a_trigger_that_was_changed_by_hand(patient: Patient) -> None:
    """It has the right name and calls another function, or fires for another event."""
    table, name = "letter", "sqlaqueue_message_insert"
    patient.execute(
        "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        f"CREATE OR REPLACE TRIGGER {name} AFTER INSERT ON {table} REFERENCING NEW TABLE AS new_rows "
        "FOR EACH STATEMENT EXECUTE FUNCTION nothing()",
    )
    finding = patient.healed("altered_trigger", Letter)
    assert f"{name} of {table}" in finding.summary
    assert finding.severity == "critical"


def test_translated_schemas(patient: Patient) -> None:
    engine = patient.engine.execution_options(schema_translate_map={None: "a tenant"})
    patient.execute('CREATE SCHEMA "a tenant"')
    Email.metadata.create_all(engine)
    with Session(engine) as session:
        assert doctor(session, Email, Letter, deep=True) == []
    patient.execute(
        'DROP INDEX "a tenant".ix_email_queue_claim',
        'ALTER TABLE "a tenant".email DISABLE TRIGGER sqlaqueue_wake_insert',
    )
    with Session(engine) as session:
        found = doctor(session, Email, Letter)
    assert sorted(each.code for each in found) == ["disabled_trigger", "missing_index"]
    for finding in found:
        patient.repair(finding.fixes[0])
    with Session(engine) as session:
        assert doctor(session, Email, Letter) == []


def test_a_partitioned_table(patient: Patient) -> None:
    patient.execute(
        "CREATE TABLE parts (LIKE email INCLUDING DEFAULTS INCLUDING IDENTITY) PARTITION BY HASH (id)",
        "CREATE TABLE part PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
        "CREATE TABLE part_1 PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        "ALTER TABLE parts ALTER id DROP DEFAULT",
        "ALTER TABLE part ALTER id DROP DEFAULT",
        "DROP TABLE email",
        "ALTER TABLE parts RENAME TO email",
    )
    found = [each for each in patient.findings(Email) if each.code == "missing_index"]
    # A unique index would need the columns of the partition key.
    for finding in found:
        if finding.severity == "warning":
            assert "CONCURRENTLY" not in finding.fixes[0]
            patient.repair(finding.fixes[0])


# -- rights of the session's role ----------------------------------------------------------------------------------


@pytest.fixture
def role(patient: Patient) -> Iterator[str]:
    name = f"night shift {patient.database.name}"
    with new_role(patient.database, name):
        yield name


@pytest.fixture
def as_role(patient: Patient, role: str) -> sa.Engine:
    """Return an engine whose sessions have the role of a worker, with all rights."""
    patient.execute(
        f'GRANT ALL ON ALL TABLES IN SCHEMA public TO "{role}"',
        f'GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO "{role}"',
    )
    engine = plain_engine(patient.database.url())

    @sa.event.listens_for(engine, "connect")
    def _(connection: Any, _: Any) -> None:
        connection.execute(f'SET ROLE "{role}"')
        connection.commit()

    return engine


def findings(engine: sa.Engine, *models: Any) -> list[Finding]:
    with Session(engine) as session:
        found = doctor(session, *models)
    # The role may not see the sessions of others.
    return [each for each in found if each.code != "hidden_sessions"]


def test_a_role_with_all_rights(as_role: sa.Engine) -> None:
    assert findings(as_role, *MODELS) == []


def test_missing_grants(patient: Patient, role: str, as_role: sa.Engine) -> None:
    patient.execute(f'REVOKE ALL ON email, sqlaqueue_consumer FROM "{role}"')
    found = findings(as_role, Email, Letter)
    grants = [each for each in found if each.code == "missing_grant"]
    assert {each.queue for each in grants} == {"email", "letter"}
    assert "email" in " ".join(each.summary for each in grants)
    # What cannot be read is not said to be healthy.
    failed = [each for each in found if each.code == "check_failed"]
    assert failed
    assert all(each.facts["sqlstate"] == "42501" for each in failed)
    for finding in grants:
        patient.repair(finding.fixes[0])
    assert findings(as_role, *MODELS) == []


def test_a_schema_that_the_role_may_not_use(patient: Patient, role: str, as_role: sa.Engine) -> None:
    patient.execute("CREATE SCHEMA vault")
    engine = as_role.execution_options(schema_translate_map={None: "vault"})
    Email.metadata.create_all(patient.engine.execution_options(schema_translate_map={None: "vault"}))
    (finding,) = findings(engine, Email)
    assert (finding.code, finding.severity) == ("missing_schema_grant", "critical")
    assert finding.fixes == (f'GRANT USAGE ON SCHEMA vault TO "{role}";',)
    patient.repair(finding.fixes[0])
    patient.execute(f'GRANT ALL ON ALL TABLES IN SCHEMA vault TO "{role}"')
    patient.execute(f'GRANT ALL ON ALL SEQUENCES IN SCHEMA vault TO "{role}"')
    assert findings(engine, Email) == []


def test_missing_policies(patient: Patient, as_role: sa.Engine) -> None:
    patient.execute("ALTER TABLE email ENABLE ROW LEVEL SECURITY")
    found = findings(as_role, Email)
    assert {each.code for each in found} == {"missing_policy"}
    assert all("email" in each.summary for each in found)
    quoted = [each.fixes[0] for each in found]
    for fix in quoted:
        patient.repair(fix)
    assert findings(as_role, Email) == []
