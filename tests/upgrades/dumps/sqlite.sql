BEGIN TRANSACTION;
CREATE TABLE call (
	function TEXT NOT NULL, 
	arguments JSON NOT NULL, 
	result JSON, 
	id INTEGER NOT NULL, 
	status VARCHAR(20) DEFAULT 'pending' NOT NULL, 
	priority SMALLINT DEFAULT 0 NOT NULL, 
	run_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	attempts INTEGER DEFAULT 0 NOT NULL, 
	max_attempts SMALLINT, 
	last_error TEXT, 
	created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	finished_at DATETIME, 
	lease_token CHAR(32), 
	lease_expires_at DATETIME, 
	claimed_by TEXT, 
	PRIMARY KEY (id)
);
INSERT INTO "call" VALUES('program.noted','{"key": "ended-0-again"}',NULL,1,'completed',0,'2026-11-30 12:19:23.613000',1,NULL,NULL,'2026-11-30 12:19:23.613000','2026-11-30 12:19:27.804085',NULL,NULL,NULL);
INSERT INTO "call" VALUES('program.noted','{"key": "ended-1"}',NULL,2,'completed',0,'2026-11-30 12:19:23.725000',1,NULL,NULL,'2026-11-30 12:19:23.725000','2026-11-30 12:19:28.151130',NULL,NULL,NULL);
INSERT INTO "call" VALUES('program.noted','{"key": "ended-2"}',NULL,3,'completed',0,'2026-11-30 12:19:23.789000',1,NULL,NULL,'2026-11-30 12:19:23.789000','2026-11-30 12:19:28.154929',NULL,NULL,NULL);
INSERT INTO "call" VALUES('program.noted','{"key": "due-3"}',NULL,4,'pending',0,'2026-11-30 12:19:32.166000',0,NULL,NULL,'2026-11-30 12:19:32.166000',NULL,NULL,NULL,NULL);
INSERT INTO "call" VALUES('program.noted','{"key": "due-4-again"}',NULL,5,'pending',0,'2026-11-30 12:19:32.242000',0,NULL,NULL,'2026-11-30 12:19:32.242000',NULL,NULL,NULL,NULL);
INSERT INTO "call" VALUES('program.noted','{"key": "due-5"}',NULL,6,'pending',0,'2026-11-30 12:19:32.249000',0,NULL,NULL,'2026-11-30 12:19:32.249000',NULL,NULL,NULL,NULL);
CREATE TABLE effect (
	queue VARCHAR(60) NOT NULL, 
	"key" VARCHAR(60) NOT NULL, 
	version VARCHAR(60) NOT NULL, 
	PRIMARY KEY (queue, "key")
);
INSERT INTO "effect" VALUES('plain_update','ended-1','0.1.0');
INSERT INTO "effect" VALUES('plain_update','ended-2','0.1.0');
INSERT INTO "effect" VALUES('plain_update','ended-0-again','0.1.0');
INSERT INTO "effect" VALUES('full_update','ended-1','0.1.0');
INSERT INTO "effect" VALUES('full_update','ended-2','0.1.0');
INSERT INTO "effect" VALUES('full_update','ended-0-again','0.1.0');
INSERT INTO "effect" VALUES('ordered','ended-1','0.1.0');
INSERT INTO "effect" VALUES('ordered','ended-2','0.1.0');
INSERT INTO "effect" VALUES('line','ended-0-again.1','0.1.0');
INSERT INTO "effect" VALUES('line','ended-0-again.2','0.1.0');
INSERT INTO "effect" VALUES('line','ended-1.1','0.1.0');
INSERT INTO "effect" VALUES('line','ended-1.2','0.1.0');
INSERT INTO "effect" VALUES('line','ended-2.1','0.1.0');
INSERT INTO "effect" VALUES('line','ended-2.2','0.1.0');
INSERT INTO "effect" VALUES('call','ended-0-again','0.1.0');
INSERT INTO "effect" VALUES('call','ended-1','0.1.0');
INSERT INTO "effect" VALUES('call','ended-2','0.1.0');
INSERT INTO "effect" VALUES('import','ended-1','0.1.0');
INSERT INTO "effect" VALUES('import','ended-2','0.1.0');
INSERT INTO "effect" VALUES('import','ended-0-again','0.1.0');
CREATE TABLE full_update (
	id INTEGER NOT NULL, 
	"key" VARCHAR(60) NOT NULL, 
	customer VARCHAR(60) DEFAULT 'a' NOT NULL, 
	status VARCHAR(20) DEFAULT 'pending' NOT NULL, 
	priority SMALLINT DEFAULT 0 NOT NULL, 
	run_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	attempts INTEGER DEFAULT 0 NOT NULL, 
	max_attempts SMALLINT, 
	last_error TEXT, 
	created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	finished_at DATETIME, 
	lease_token CHAR(32), 
	lease_expires_at DATETIME, 
	claimed_by TEXT, 
	traceparent TEXT, 
	PRIMARY KEY (id)
);
INSERT INTO "full_update" VALUES(1,'failed','a','failed',0,'2026-11-30 12:19:21.657000',1,NULL,'Fail: it has to fail','2026-11-30 12:19:21.657000','2026-11-30 12:19:22.333884',NULL,NULL,NULL,NULL);
INSERT INTO "full_update" VALUES(2,'ended-0-again','customer 0','completed',0,'2026-11-30 12:19:25.042140',2,NULL,NULL,'2026-11-30 12:19:23.576000','2026-11-30 12:19:25.139793',NULL,NULL,NULL,NULL);
INSERT INTO "full_update" VALUES(3,'ended-1','customer 1','completed',0,'2026-11-30 12:19:23.723000',1,NULL,NULL,'2026-11-30 12:19:23.723000','2026-11-30 12:19:25.074072',NULL,NULL,NULL,NULL);
INSERT INTO "full_update" VALUES(4,'ended-2','customer 2','completed',0,'2026-11-30 12:19:23.775000',1,NULL,NULL,'2026-11-30 12:19:23.775000','2026-11-30 12:19:25.130442',NULL,NULL,NULL,NULL);
INSERT INTO "full_update" VALUES(5,'later','a','pending',0,'2200-01-01 00:00:00.000000',0,NULL,NULL,'2026-11-30 12:19:31.956000',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "full_update" VALUES(6,'cancelled','a','cancelled',0,'2200-01-01 00:00:00.000000',0,NULL,NULL,'2026-11-30 12:19:31.956000','2026-11-30 12:19:32.136455',NULL,NULL,NULL,NULL);
INSERT INTO "full_update" VALUES(7,'due-3','customer 0','pending',0,'2026-11-30 12:19:32.164000',0,NULL,NULL,'2026-11-30 12:19:32.164000',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "full_update" VALUES(8,'due-4-again','customer 1','processing',0,'2026-11-30 12:19:32.170000',1,NULL,NULL,'2026-11-30 12:19:32.170000',NULL,'090dbd851585455a8cc1d21238a31cc5','2026-01-01 00:00:00.000000','vm:13590',NULL);
INSERT INTO "full_update" VALUES(9,'due-5','customer 2','pending',0,'2026-11-30 12:19:32.248000',0,NULL,NULL,'2026-11-30 12:19:32.248000',NULL,NULL,NULL,NULL,NULL);
CREATE TABLE import (
	id INTEGER NOT NULL, 
	"key" VARCHAR(60) NOT NULL, 
	customer VARCHAR(60) DEFAULT 'a' NOT NULL, 
	status VARCHAR(20) DEFAULT 'waiting' NOT NULL, 
	priority SMALLINT DEFAULT 0 NOT NULL, 
	run_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	attempts INTEGER DEFAULT 0 NOT NULL, 
	max_attempts SMALLINT, 
	last_error TEXT, 
	created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	finished_at DATETIME, 
	lease_token CHAR(32), 
	lease_expires_at DATETIME, 
	claimed_by TEXT, 
	waits_for_count INTEGER DEFAULT 1, 
	PRIMARY KEY (id)
);
INSERT INTO "import" VALUES(1,'ended-0-again','a','completed',0,'2026-11-30 12:19:28.535196',2,NULL,NULL,'2026-11-30 12:19:23.616000','2026-11-30 12:19:28.621350',NULL,NULL,NULL,0);
INSERT INTO "import" VALUES(2,'ended-1','a','completed',0,'2026-11-30 12:19:28.424051',1,NULL,NULL,'2026-11-30 12:19:23.726000','2026-11-30 12:19:28.521211',NULL,NULL,NULL,0);
INSERT INTO "import" VALUES(3,'ended-2','a','completed',0,'2026-11-30 12:19:28.424051',1,NULL,NULL,'2026-11-30 12:19:23.789000','2026-11-30 12:19:28.566874',NULL,NULL,NULL,0);
INSERT INTO "import" VALUES(4,'due-3','a','waiting',0,'2026-11-30 12:19:32.166000',0,NULL,NULL,'2026-11-30 12:19:32.166000',NULL,NULL,NULL,NULL,1);
INSERT INTO "import" VALUES(5,'due-4-again','a','waiting',0,'2026-11-30 12:19:32.242000',0,NULL,NULL,'2026-11-30 12:19:32.242000',NULL,NULL,NULL,NULL,1);
INSERT INTO "import" VALUES(6,'due-5','a','waiting',0,'2026-11-30 12:19:32.249000',0,NULL,NULL,'2026-11-30 12:19:32.249000',NULL,NULL,NULL,NULL,1);
CREATE TABLE line (
	import_id INTEGER, 
	id INTEGER NOT NULL, 
	"key" VARCHAR(60) NOT NULL, 
	customer VARCHAR(60) DEFAULT 'a' NOT NULL, 
	status VARCHAR(20) DEFAULT 'pending' NOT NULL, 
	priority SMALLINT DEFAULT 0 NOT NULL, 
	run_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	attempts INTEGER DEFAULT 0 NOT NULL, 
	max_attempts SMALLINT, 
	last_error TEXT, 
	created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	finished_at DATETIME, 
	lease_token CHAR(32), 
	lease_expires_at DATETIME, 
	claimed_by TEXT, 
	PRIMARY KEY (id), 
	FOREIGN KEY(import_id) REFERENCES import (id)
);
INSERT INTO "line" VALUES(1,1,'ended-0-again.1','a','completed',0,'2026-11-30 12:19:23.693000',1,NULL,NULL,'2026-11-30 12:19:23.693000','2026-11-30 12:19:27.532880',NULL,NULL,NULL);
INSERT INTO "line" VALUES(1,2,'ended-0-again.2','a','completed',0,'2026-11-30 12:19:23.693000',1,NULL,NULL,'2026-11-30 12:19:23.693000','2026-11-30 12:19:27.539605',NULL,NULL,NULL);
INSERT INTO "line" VALUES(2,3,'ended-1.1','a','completed',0,'2026-11-30 12:19:23.763000',1,NULL,NULL,'2026-11-30 12:19:23.763000','2026-11-30 12:19:27.541297',NULL,NULL,NULL);
INSERT INTO "line" VALUES(2,4,'ended-1.2','a','completed',0,'2026-11-30 12:19:23.763000',1,NULL,NULL,'2026-11-30 12:19:23.763000','2026-11-30 12:19:27.545140',NULL,NULL,NULL);
INSERT INTO "line" VALUES(3,5,'ended-2.1','a','completed',0,'2026-11-30 12:19:23.798000',1,NULL,NULL,'2026-11-30 12:19:23.798000','2026-11-30 12:19:27.547784',NULL,NULL,NULL);
INSERT INTO "line" VALUES(3,6,'ended-2.2','a','completed',0,'2026-11-30 12:19:23.798000',1,NULL,NULL,'2026-11-30 12:19:23.798000','2026-11-30 12:19:27.549938',NULL,NULL,NULL);
INSERT INTO "line" VALUES(4,7,'due-3.1','a','pending',0,'2026-11-30 12:19:32.167000',0,NULL,NULL,'2026-11-30 12:19:32.167000',NULL,NULL,NULL,NULL);
INSERT INTO "line" VALUES(4,8,'due-3.2','a','pending',0,'2026-11-30 12:19:32.167000',0,NULL,NULL,'2026-11-30 12:19:32.167000',NULL,NULL,NULL,NULL);
INSERT INTO "line" VALUES(5,9,'due-4-again.1','a','pending',0,'2026-11-30 12:19:32.245000',0,NULL,NULL,'2026-11-30 12:19:32.245000',NULL,NULL,NULL,NULL);
INSERT INTO "line" VALUES(5,10,'due-4-again.2','a','pending',0,'2026-11-30 12:19:32.245000',0,NULL,NULL,'2026-11-30 12:19:32.245000',NULL,NULL,NULL,NULL);
INSERT INTO "line" VALUES(6,11,'due-5.1','a','pending',0,'2026-11-30 12:19:32.250000',0,NULL,NULL,'2026-11-30 12:19:32.250000',NULL,NULL,NULL,NULL);
INSERT INTO "line" VALUES(6,12,'due-5.2','a','pending',0,'2026-11-30 12:19:32.254000',0,NULL,NULL,'2026-11-30 12:19:32.254000',NULL,NULL,NULL,NULL);
CREATE TABLE ordered (
	id INTEGER NOT NULL, 
	"key" VARCHAR(60) NOT NULL, 
	customer VARCHAR(60) DEFAULT 'a' NOT NULL, 
	status VARCHAR(20) DEFAULT 'pending' NOT NULL, 
	priority SMALLINT DEFAULT 0 NOT NULL, 
	run_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	attempts INTEGER DEFAULT 0 NOT NULL, 
	max_attempts SMALLINT, 
	last_error TEXT, 
	created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	finished_at DATETIME, 
	lease_token CHAR(32), 
	lease_expires_at DATETIME, 
	claimed_by TEXT, 
	started_at DATETIME, 
	PRIMARY KEY (id)
);
INSERT INTO "ordered" VALUES(1,'failed','a','failed',0,'2026-11-30 12:19:21.667000',1,NULL,'Fail: it has to fail','2026-11-30 12:19:21.667000','2026-11-30 12:19:23.048122',NULL,NULL,'vm:13590','2026-11-30 12:19:23.007839');
INSERT INTO "ordered" VALUES(2,'ended-0-again','customer 0','processing',0,'2026-11-30 12:19:27.306480',2,NULL,NULL,'2026-11-30 12:19:23.585000',NULL,'d532fb3f7691433393085f00ca959b94','2026-01-01 00:00:00.000000','vm:13590','2026-11-30 12:19:32.558455');
INSERT INTO "ordered" VALUES(3,'ended-1','customer 1','completed',0,'2026-11-30 12:19:23.757000',1,NULL,NULL,'2026-11-30 12:19:23.757000','2026-11-30 12:19:27.268395',NULL,NULL,'vm:13590','2026-11-30 12:19:27.262784');
INSERT INTO "ordered" VALUES(4,'ended-2','customer 2','completed',0,'2026-11-30 12:19:23.783000',1,NULL,NULL,'2026-11-30 12:19:23.783000','2026-11-30 12:19:27.271780',NULL,NULL,'vm:13590','2026-11-30 12:19:27.262784');
INSERT INTO "ordered" VALUES(5,'later','a','pending',0,'2200-01-01 00:00:00.000000',0,NULL,NULL,'2026-11-30 12:19:31.957000',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "ordered" VALUES(6,'cancelled','a','cancelled',0,'2200-01-01 00:00:00.000000',0,NULL,NULL,'2026-11-30 12:19:31.957000','2026-11-30 12:19:32.148728',NULL,NULL,NULL,NULL);
INSERT INTO "ordered" VALUES(7,'due-3','customer 0','pending',0,'2026-11-30 12:19:32.166000',0,NULL,NULL,'2026-11-30 12:19:32.166000',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "ordered" VALUES(8,'due-4-again','customer 1','pending',0,'2026-11-30 12:19:32.207000',0,NULL,NULL,'2026-11-30 12:19:32.207000',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "ordered" VALUES(9,'due-5','customer 2','pending',0,'2026-11-30 12:19:32.249000',0,NULL,NULL,'2026-11-30 12:19:32.249000',NULL,NULL,NULL,NULL,NULL);
CREATE TABLE plain_update (
	id INTEGER NOT NULL, 
	"key" VARCHAR(60) NOT NULL, 
	customer VARCHAR(60) DEFAULT 'a' NOT NULL, 
	status VARCHAR(20) DEFAULT 'pending' NOT NULL, 
	priority SMALLINT DEFAULT 0 NOT NULL, 
	run_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	attempts INTEGER DEFAULT 0 NOT NULL, 
	max_attempts SMALLINT, 
	last_error TEXT, 
	created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	finished_at DATETIME, 
	lease_token CHAR(32), 
	lease_expires_at DATETIME, 
	claimed_by TEXT, 
	PRIMARY KEY (id)
);
INSERT INTO "plain_update" VALUES(1,'failed','a','failed',0,'2026-11-30 12:19:21.680000',1,NULL,'Fail: it has to fail','2026-11-30 12:19:21.680000','2026-11-30 12:19:21.907941',NULL,NULL,NULL);
INSERT INTO "plain_update" VALUES(2,'ended-0-again','customer 0','completed',0,'2026-11-30 12:19:24.570017',2,NULL,NULL,'2026-11-30 12:19:23.506000','2026-11-30 12:19:24.588052',NULL,NULL,NULL);
INSERT INTO "plain_update" VALUES(3,'ended-1','customer 1','completed',0,'2026-11-30 12:19:23.617000',1,NULL,NULL,'2026-11-30 12:19:23.617000','2026-11-30 12:19:24.540848',NULL,NULL,NULL);
INSERT INTO "plain_update" VALUES(4,'ended-2','customer 2','completed',0,'2026-11-30 12:19:23.763000',1,NULL,NULL,'2026-11-30 12:19:23.763000','2026-11-30 12:19:24.566906',NULL,NULL,NULL);
INSERT INTO "plain_update" VALUES(5,'later','a','pending',0,'2200-01-01 00:00:00.000000',0,NULL,NULL,'2026-11-30 12:19:31.958000',NULL,NULL,NULL,NULL);
INSERT INTO "plain_update" VALUES(6,'cancelled','a','cancelled',0,'2200-01-01 00:00:00.000000',0,NULL,NULL,'2026-11-30 12:19:31.958000','2026-11-30 12:19:32.068990',NULL,NULL,NULL);
INSERT INTO "plain_update" VALUES(7,'due-3','customer 0','processing',0,'2026-11-30 12:19:32.162000',1,NULL,NULL,'2026-11-30 12:19:32.162000',NULL,'decc8c14dac54e1791d26692b5c5fe76','2026-01-01 00:00:00.000000','vm:13590');
INSERT INTO "plain_update" VALUES(8,'due-4-again','customer 1','pending',0,'2026-11-30 12:19:32.168000',0,NULL,NULL,'2026-11-30 12:19:32.168000',NULL,NULL,NULL,NULL);
INSERT INTO "plain_update" VALUES(9,'due-5','customer 2','pending',0,'2026-11-30 12:19:32.243000',0,NULL,NULL,'2026-11-30 12:19:32.243000',NULL,NULL,NULL,NULL);
CREATE TABLE sent (
	queue VARCHAR(60) NOT NULL, 
	"key" VARCHAR(60) NOT NULL, 
	PRIMARY KEY (queue, "key")
);
INSERT INTO "sent" VALUES('plain_update','ended-0-again');
INSERT INTO "sent" VALUES('full_update','ended-0-again');
INSERT INTO "sent" VALUES('ordered','ended-0-again');
INSERT INTO "sent" VALUES('import','ended-0-again');
INSERT INTO "sent" VALUES('line','ended-0-again.1');
INSERT INTO "sent" VALUES('line','ended-0-again.2');
INSERT INTO "sent" VALUES('call','ended-0-again');
INSERT INTO "sent" VALUES('plain_update','ended-1');
INSERT INTO "sent" VALUES('full_update','ended-1');
INSERT INTO "sent" VALUES('ordered','ended-1');
INSERT INTO "sent" VALUES('import','ended-1');
INSERT INTO "sent" VALUES('line','ended-1.1');
INSERT INTO "sent" VALUES('line','ended-1.2');
INSERT INTO "sent" VALUES('call','ended-1');
INSERT INTO "sent" VALUES('plain_update','ended-2');
INSERT INTO "sent" VALUES('full_update','ended-2');
INSERT INTO "sent" VALUES('ordered','ended-2');
INSERT INTO "sent" VALUES('import','ended-2');
INSERT INTO "sent" VALUES('line','ended-2.1');
INSERT INTO "sent" VALUES('line','ended-2.2');
INSERT INTO "sent" VALUES('call','ended-2');
INSERT INTO "sent" VALUES('plain_update','due-3');
INSERT INTO "sent" VALUES('full_update','due-3');
INSERT INTO "sent" VALUES('ordered','due-3');
INSERT INTO "sent" VALUES('import','due-3');
INSERT INTO "sent" VALUES('line','due-3.1');
INSERT INTO "sent" VALUES('line','due-3.2');
INSERT INTO "sent" VALUES('call','due-3');
INSERT INTO "sent" VALUES('plain_update','due-4-again');
INSERT INTO "sent" VALUES('full_update','due-4-again');
INSERT INTO "sent" VALUES('ordered','due-4-again');
INSERT INTO "sent" VALUES('import','due-4-again');
INSERT INTO "sent" VALUES('line','due-4-again.1');
INSERT INTO "sent" VALUES('line','due-4-again.2');
INSERT INTO "sent" VALUES('call','due-4-again');
INSERT INTO "sent" VALUES('plain_update','due-5');
INSERT INTO "sent" VALUES('full_update','due-5');
INSERT INTO "sent" VALUES('ordered','due-5');
INSERT INTO "sent" VALUES('import','due-5');
INSERT INTO "sent" VALUES('line','due-5.1');
INSERT INTO "sent" VALUES('line','due-5.2');
INSERT INTO "sent" VALUES('call','due-5');
CREATE TABLE sqlaqueue_attempt (
	id INTEGER NOT NULL, 
	queue TEXT NOT NULL, 
	"key" JSON NOT NULL, 
	attempt INTEGER NOT NULL, 
	started_at DATETIME, 
	ended_at DATETIME NOT NULL, 
	worker TEXT, 
	outcome TEXT NOT NULL, 
	error TEXT, 
	traceback TEXT, 
	PRIMARY KEY (id)
);
INSERT INTO "sqlaqueue_attempt" VALUES(1,'full_update','[1]',1,'2026-11-30 12:19:22.337423','2026-11-30 12:19:22.337480','vm:13590','failed','Fail: it has to fail','Traceback (most recent call last):
  File "/tmp/w_u/tests/upgrades/program.py", line 234, in fail
    raise Fail("it has to fail")
sqlaqueue.exc.Fail: it has to fail
');
INSERT INTO "sqlaqueue_attempt" VALUES(2,'full_update','[2]',1,'2026-11-30 12:19:24.988156','2026-11-30 12:19:24.992021','vm:13590','retried',NULL,'Traceback (most recent call last):
  File "/tmp/w_u/tests/upgrades/program.py", line 193, in run
    raise Retry(0.05)
sqlaqueue.exc.Retry: retry requested by the handler
');
INSERT INTO "sqlaqueue_attempt" VALUES(3,'full_update','[3]',1,'2026-11-30 12:19:25.111407','2026-11-30 12:19:25.112646','vm:13590','completed',NULL,NULL);
INSERT INTO "sqlaqueue_attempt" VALUES(4,'full_update','[4]',1,'2026-11-30 12:19:25.126847','2026-11-30 12:19:25.129132','vm:13590','completed',NULL,NULL);
INSERT INTO "sqlaqueue_attempt" VALUES(5,'full_update','[2]',2,'2026-11-30 12:19:25.139104','2026-11-30 12:19:25.139925','vm:13590','completed',NULL,NULL);
CREATE TABLE sqlaqueue_consumer (
	id TEXT NOT NULL, 
	queue TEXT NOT NULL, 
	name TEXT, 
	host TEXT NOT NULL, 
	pid INTEGER NOT NULL, 
	version TEXT NOT NULL, 
	listening BOOLEAN NOT NULL, 
	running JSON NOT NULL, 
	claimed INTEGER DEFAULT 0 NOT NULL, 
	unclaimable JSON DEFAULT '[]' NOT NULL, 
	heartbeat_at DATETIME NOT NULL, 
	expires_at DATETIME NOT NULL, 
	created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "sqlaqueue_consumer" VALUES('1','plain_update','dead:1','dead',1,'0.1.0',1,'[]',0,'[]','2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000','2026-11-30 12:19:32.582000');
CREATE TABLE sqlaqueue_control (
	queue TEXT NOT NULL, 
	"key" JSON NOT NULL, 
	created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	PRIMARY KEY (queue, "key")
);
INSERT INTO "sqlaqueue_control" VALUES('plain_update','[]','2026-11-30 12:19:32.633164');
INSERT INTO "sqlaqueue_control" VALUES('sqlaqueue_pause plain_update','["the upgrade","ada"]','2026-11-30 12:19:32.633164');
CREATE TABLE sqlaqueue_minute (
	queue TEXT NOT NULL, 
	minute INTEGER NOT NULL, 
	pending INTEGER, 
	due INTEGER, 
	oldest_due INTEGER, 
	completed INTEGER, 
	retried INTEGER, 
	failed INTEGER, 
	cancelled INTEGER, 
	wait_0 INTEGER, 
	wait_1 INTEGER, 
	wait_2 INTEGER, 
	wait_3 INTEGER, 
	wait_4 INTEGER, 
	wait_5 INTEGER, 
	wait_6 INTEGER, 
	wait_7 INTEGER, 
	wait_8 INTEGER, 
	wait_9 INTEGER, 
	wait_10 INTEGER, 
	wait_11 INTEGER, 
	wait_12 INTEGER, 
	wait_13 INTEGER, 
	wait_14 INTEGER, 
	wait_15 INTEGER, 
	wait_16 INTEGER, 
	wait_17 INTEGER, 
	wait_18 INTEGER, 
	wait_19 INTEGER, 
	wait_20 INTEGER, 
	run_0 INTEGER, 
	run_1 INTEGER, 
	run_2 INTEGER, 
	run_3 INTEGER, 
	run_4 INTEGER, 
	run_5 INTEGER, 
	run_6 INTEGER, 
	run_7 INTEGER, 
	run_8 INTEGER, 
	run_9 INTEGER, 
	run_10 INTEGER, 
	run_11 INTEGER, 
	run_12 INTEGER, 
	run_13 INTEGER, 
	run_14 INTEGER, 
	run_15 INTEGER, 
	run_16 INTEGER, 
	run_17 INTEGER, 
	run_18 INTEGER, 
	run_19 INTEGER, 
	run_20 INTEGER, 
	PRIMARY KEY (queue, minute)
);
INSERT INTO "sqlaqueue_minute" VALUES('full_update',29934019,0,0,NULL,3,1,1,NULL,NULL,NULL,NULL,NULL,NULL,1,NULL,NULL,1,3,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,3,2,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE sqlaqueue_rate (
	queue TEXT NOT NULL, 
	rate TEXT NOT NULL, 
	"key" INTEGER NOT NULL, 
	next_at DATETIME NOT NULL, 
	throttled_until DATETIME, 
	PRIMARY KEY (queue, rate, "key")
);
INSERT INTO "sqlaqueue_rate" VALUES('full_update','/1s',0,'2026-11-30 12:19:32.349878',NULL);
CREATE TABLE sqlaqueue_schedule (
	name TEXT NOT NULL, 
	queue TEXT NOT NULL, 
	model TEXT, 
	cron TEXT, 
	every DOUBLE, 
	timezone TEXT DEFAULT 'UTC' NOT NULL, 
	"values" JSON DEFAULT '{}' NOT NULL, 
	factory TEXT, 
	jitter DOUBLE DEFAULT 0 NOT NULL, 
	catch_up INTEGER DEFAULT 1 NOT NULL, 
	misfire_grace DOUBLE, 
	skip_unfinished BOOLEAN DEFAULT 0 NOT NULL, 
	paused_at DATETIME, 
	run_requested_at DATETIME, 
	last_tick DATETIME, 
	next_tick DATETIME, 
	last_job JSON, 
	edited_at DATETIME, 
	planned_for TEXT, 
	planned_at DATETIME, 
	rules TEXT, 
	code JSON, 
	last_error TEXT, 
	created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	PRIMARY KEY (name), 
	CONSTRAINT ck_sqlaqueue_schedule_cron_or_every CHECK ((cron IS NULL) <> (every IS NULL)), 
	CONSTRAINT ck_sqlaqueue_schedule_every CHECK (every BETWEEN 1 AND 3155760000), 
	CONSTRAINT ck_sqlaqueue_schedule_spans CHECK (misfire_grace BETWEEN 0 AND 3155760000 AND jitter BETWEEN 0 AND 3155760000), 
	CONSTRAINT ck_sqlaqueue_schedule_catch_up CHECK (catch_up BETWEEN 0 AND 1000), 
	CONSTRAINT ck_sqlaqueue_schedule_moments CHECK ((created_at IS NULL OR created_at > '1970-01-01 00:00:00.000000' AND created_at < '9000-01-01 00:00:00.000000') AND (paused_at IS NULL OR paused_at > '1970-01-01 00:00:00.000000' AND paused_at < '9000-01-01 00:00:00.000000') AND (run_requested_at IS NULL OR run_requested_at > '1970-01-01 00:00:00.000000' AND run_requested_at < '9000-01-01 00:00:00.000000') AND (last_tick IS NULL OR last_tick > '1970-01-01 00:00:00.000000' AND last_tick < '9000-01-01 00:00:00.000000') AND (next_tick IS NULL OR next_tick > '1970-01-01 00:00:00.000000' AND next_tick < '9000-01-01 00:00:00.000000') AND (edited_at IS NULL OR edited_at > '1970-01-01 00:00:00.000000' AND edited_at < '9000-01-01 00:00:00.000000'))
);
INSERT INTO "sqlaqueue_schedule" VALUES('ticked','ticked','Ticked',NULL,1.0,'UTC','{"key": "tick"}',NULL,0.0,1000,3600.0,0,NULL,NULL,'2026-11-30 12:19:31.000000','2026-11-30 12:19:32.000000','[3]',NULL,'1.0|UTC','2026-11-30 12:19:31.941802',NULL,'{"queue": "ticked", "model": "Ticked", "cron": null, "every": 1.0, "timezone": "UTC", "values": {"key": "tick"}, "factory": null, "jitter": 0.0, "catch_up": 1000, "misfire_grace": 3600.0, "skip_unfinished": false}',NULL,'2026-11-30 12:19:28.739000');
CREATE TABLE sqlaqueue_tick (
	schedule TEXT NOT NULL, 
	tick DATETIME NOT NULL, 
	queue TEXT NOT NULL, 
	"key" JSON, 
	fired_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	PRIMARY KEY (schedule, tick)
);
INSERT INTO "sqlaqueue_tick" VALUES('ticked','2026-11-30 12:19:29.000000','ticked','[1]','2026-11-30 12:19:31.948946');
INSERT INTO "sqlaqueue_tick" VALUES('ticked','2026-11-30 12:19:30.000000','ticked','[2]','2026-11-30 12:19:31.948946');
INSERT INTO "sqlaqueue_tick" VALUES('ticked','2026-11-30 12:19:31.000000','ticked','[3]','2026-11-30 12:19:31.948946');
CREATE TABLE sqlaqueue_waits_import (
	xact INTEGER NOT NULL, 
	id INTEGER NOT NULL, 
	relation TEXT NOT NULL, 
	keys JSON NOT NULL, 
	PRIMARY KEY (xact, id)
);
CREATE TABLE ticked (
	id INTEGER NOT NULL, 
	"key" VARCHAR(60) NOT NULL, 
	customer VARCHAR(60) DEFAULT 'a' NOT NULL, 
	status VARCHAR(20) DEFAULT 'pending' NOT NULL, 
	priority SMALLINT DEFAULT 0 NOT NULL, 
	run_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	attempts INTEGER DEFAULT 0 NOT NULL, 
	max_attempts SMALLINT, 
	last_error TEXT, 
	created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, 
	finished_at DATETIME, 
	lease_token CHAR(32), 
	lease_expires_at DATETIME, 
	claimed_by TEXT, 
	PRIMARY KEY (id)
);
INSERT INTO "ticked" VALUES(1,'tick','a','pending',0,'2026-11-30 12:19:29.000000',0,NULL,NULL,'2026-11-30 12:19:31.947000',NULL,NULL,NULL,NULL);
INSERT INTO "ticked" VALUES(2,'tick','a','pending',0,'2026-11-30 12:19:30.000000',0,NULL,NULL,'2026-11-30 12:19:31.947000',NULL,NULL,NULL,NULL);
INSERT INTO "ticked" VALUES(3,'tick','a','pending',0,'2026-11-30 12:19:31.000000',0,NULL,NULL,'2026-11-30 12:19:31.947000',NULL,NULL,NULL,NULL);
CREATE INDEX ix_plain_update_queue_quarantined ON plain_update (priority, run_at, id) WHERE status = 'pending' AND lease_token IS NOT NULL;
CREATE INDEX ix_plain_update_queue_claim ON plain_update (priority, run_at, id) WHERE status = 'pending';
CREATE INDEX ix_plain_update_queue_lease ON plain_update (lease_expires_at) WHERE status = 'processing';
CREATE INDEX ix_full_update_queue_lease ON full_update (lease_expires_at) WHERE status = 'processing';
CREATE INDEX ix_full_update_queue_quarantined ON full_update (priority, run_at, id) WHERE status = 'pending' AND lease_token IS NOT NULL;
CREATE INDEX ix_full_update_queue_finished ON full_update (status, finished_at) WHERE status = 'failed';
CREATE UNIQUE INDEX ix_full_update_queue_unique ON full_update ("key") WHERE status = 'pending' OR status = 'processing';
CREATE INDEX ix_full_update_queue_running_customer ON full_update (customer) WHERE status = 'processing';
CREATE INDEX ix_full_update_queue_claim ON full_update (priority, run_at, id) WHERE status = 'pending';
CREATE INDEX ix_full_update_queue_turns ON full_update (priority, customer, run_at, id) WHERE status = 'pending';
CREATE INDEX ix_sqlaqueue_attempt_ended ON sqlaqueue_attempt (queue, ended_at);
CREATE INDEX ix_sqlaqueue_attempt_job ON sqlaqueue_attempt (queue, "key");
CREATE INDEX ix_ordered_queue_quarantined ON ordered (priority, run_at, id) WHERE status = 'pending' AND lease_token IS NOT NULL;
CREATE INDEX ix_ordered_queue_claim ON ordered (priority, run_at, id) WHERE status = 'pending';
CREATE INDEX ix_ordered_queue_running_customer ON ordered (customer) WHERE status = 'processing';
CREATE INDEX ix_ordered_queue_lease ON ordered (lease_expires_at) WHERE status = 'processing';
CREATE INDEX ix_ordered_queue_order ON ordered (customer, id) WHERE status = 'pending' OR status = 'processing' OR status = 'failed';
CREATE INDEX ix_import_queue_quarantined ON import (priority, run_at, id) WHERE status = 'pending' AND lease_token IS NOT NULL;
CREATE INDEX ix_import_queue_waiting ON import (id) WHERE status = 'waiting';
CREATE INDEX ix_import_queue_lease ON import (lease_expires_at) WHERE status = 'processing';
CREATE INDEX ix_import_queue_claim ON import (priority, run_at, id) WHERE status = 'pending';
CREATE INDEX ix_ticked_queue_claim ON ticked (priority, run_at, id) WHERE status = 'pending';
CREATE INDEX ix_ticked_queue_quarantined ON ticked (priority, run_at, id) WHERE status = 'pending' AND lease_token IS NOT NULL;
CREATE INDEX ix_ticked_queue_lease ON ticked (lease_expires_at) WHERE status = 'processing';
CREATE INDEX ix_call_queue_quarantined ON call (priority, run_at, id) WHERE status = 'pending' AND lease_token IS NOT NULL;
CREATE INDEX ix_call_queue_lease ON call (lease_expires_at) WHERE status = 'processing';
CREATE INDEX ix_call_queue_claim ON call (priority, run_at, id) WHERE status = 'pending';
CREATE TRIGGER sqlaqueue_schedule_changed AFTER UPDATE ON sqlaqueue_schedule WHEN OLD.cron IS NOT NEW.cron OR OLD.every IS NOT NEW.every OR OLD.timezone IS NOT NEW.timezone OR OLD.paused_at IS NOT NEW.paused_at BEGIN UPDATE sqlaqueue_schedule SET edited_at = strftime('%Y-%m-%d %H:%M:%f000', 'now'), next_tick = CASE WHEN NEW.paused_at IS NULL THEN next_tick END WHERE name = NEW.name; END;
CREATE INDEX ix_sqlaqueue_tick_job ON sqlaqueue_tick (queue, "key");
CREATE INDEX ix_line_import_id ON line (import_id);
CREATE INDEX ix_line_queue_quarantined ON line (priority, run_at, id) WHERE status = 'pending' AND lease_token IS NOT NULL;
CREATE INDEX ix_line_queue_claim ON line (priority, run_at, id) WHERE status = 'pending';
CREATE INDEX ix_line_queue_lease ON line (lease_expires_at) WHERE status = 'processing';
CREATE INDEX ix_line_queue_waits_lines ON line (import_id, status);
CREATE TRIGGER sqlaqueue_waits_import_lines_late_insert_fcd6c659 AFTER INSERT ON line WHEN NEW.import_id IS NOT NULL AND coalesce(NEW.status = 'completed' OR NEW.status = 'failed' OR NEW.status = 'cancelled', 0) = 0 AND (EXISTS (SELECT * 
FROM import AS sqlaqueue_batch 
WHERE sqlaqueue_batch.id = NEW.import_id AND coalesce(sqlaqueue_batch.status = 'waiting' OR sqlaqueue_batch.status = 'pending', 0) = 0)) BEGIN SELECT RAISE(ABORT, 'Import has started or ended: it takes no further Line'); END;
CREATE TRIGGER sqlaqueue_waits_import_lines_late_update_20ad29f9 AFTER UPDATE ON line WHEN NEW.import_id IS NOT NULL AND coalesce(NEW.status = 'completed' OR NEW.status = 'failed' OR NEW.status = 'cancelled', 0) = 0 AND OLD.import_id IS NOT NEW.import_id AND (EXISTS (SELECT * 
FROM import AS sqlaqueue_batch 
WHERE sqlaqueue_batch.id = NEW.import_id AND coalesce(sqlaqueue_batch.status = 'waiting' OR sqlaqueue_batch.status = 'pending', 0) = 0)) BEGIN SELECT RAISE(ABORT, 'Import has started or ended: it takes no further Line'); END;
COMMIT;
