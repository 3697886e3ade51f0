/*M!999999\- enable the sandbox mode */ 
CREATE TABLE `call` (
  `function` text NOT NULL,
  `arguments` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL CHECK (json_valid(`arguments`)),
  `result` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_bin DEFAULT NULL CHECK (json_valid(`result`)),
  `id` int(11) NOT NULL AUTO_INCREMENT,
  `status` varchar(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL DEFAULT 'pending',
  `priority` smallint(6) NOT NULL DEFAULT 0,
  `run_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `attempts` int(11) NOT NULL DEFAULT 0,
  `max_attempts` smallint(6) DEFAULT NULL,
  `last_error` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `created_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `finished_at` datetime(6) DEFAULT NULL,
  `lease_token` uuid DEFAULT NULL,
  `lease_expires_at` datetime(6) DEFAULT NULL,
  `claimed_by` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  PRIMARY KEY (`id`),
  KEY `ix_call_queue_quarantined` (`status`,`lease_token`,`priority`,`run_at`,`id`),
  KEY `ix_call_queue_lease` (`status`,`lease_expires_at`),
  KEY `ix_call_queue_claim` (`status`,`priority`,`run_at`,`id`)
) ENGINE=InnoDB AUTO_INCREMENT=7 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `call` VALUES ('program.noted','{\"key\": \"ended-0-again\"}',NULL,1,'completed',0,'2026-11-30 12:19:51.402657',1,NULL,NULL,'2026-11-30 12:19:51.402657','2026-11-30 12:19:55.566597',NULL,NULL,NULL);
INSERT INTO `call` VALUES ('program.noted','{\"key\": \"ended-1\"}',NULL,2,'completed',0,'2026-11-30 12:19:51.414344',1,NULL,NULL,'2026-11-30 12:19:51.414344','2026-11-30 12:19:55.589928',NULL,NULL,NULL);
INSERT INTO `call` VALUES ('program.noted','{\"key\": \"ended-2\"}',NULL,3,'completed',0,'2026-11-30 12:19:51.489148',1,NULL,NULL,'2026-11-30 12:19:51.489148','2026-11-30 12:19:55.602389',NULL,NULL,NULL);
INSERT INTO `call` VALUES ('program.noted','{\"key\": \"due-3\"}',NULL,4,'pending',0,'2026-11-30 12:20:00.364625',0,NULL,NULL,'2026-11-30 12:20:00.364625',NULL,NULL,NULL,NULL);
INSERT INTO `call` VALUES ('program.noted','{\"key\": \"due-4-again\"}',NULL,5,'pending',0,'2026-11-30 12:20:00.446827',0,NULL,NULL,'2026-11-30 12:20:00.446827',NULL,NULL,NULL,NULL);
INSERT INTO `call` VALUES ('program.noted','{\"key\": \"due-5\"}',NULL,6,'pending',0,'2026-11-30 12:20:00.622897',0,NULL,NULL,'2026-11-30 12:20:00.622897',NULL,NULL,NULL,NULL);
CREATE TABLE `effect` (
  `queue` varchar(60) NOT NULL,
  `key` varchar(60) NOT NULL,
  `version` varchar(60) NOT NULL,
  PRIMARY KEY (`queue`,`key`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `effect` VALUES ('call','ended-0-again','0.1.0');
INSERT INTO `effect` VALUES ('call','ended-1','0.1.0');
INSERT INTO `effect` VALUES ('call','ended-2','0.1.0');
INSERT INTO `effect` VALUES ('full_update','ended-0-again','0.1.0');
INSERT INTO `effect` VALUES ('full_update','ended-1','0.1.0');
INSERT INTO `effect` VALUES ('full_update','ended-2','0.1.0');
INSERT INTO `effect` VALUES ('import','ended-0-again','0.1.0');
INSERT INTO `effect` VALUES ('import','ended-1','0.1.0');
INSERT INTO `effect` VALUES ('import','ended-2','0.1.0');
INSERT INTO `effect` VALUES ('line','ended-0-again.1','0.1.0');
INSERT INTO `effect` VALUES ('line','ended-0-again.2','0.1.0');
INSERT INTO `effect` VALUES ('line','ended-1.1','0.1.0');
INSERT INTO `effect` VALUES ('line','ended-1.2','0.1.0');
INSERT INTO `effect` VALUES ('line','ended-2.1','0.1.0');
INSERT INTO `effect` VALUES ('line','ended-2.2','0.1.0');
INSERT INTO `effect` VALUES ('ordered','ended-0-again','0.1.0');
INSERT INTO `effect` VALUES ('ordered','ended-1','0.1.0');
INSERT INTO `effect` VALUES ('ordered','ended-2','0.1.0');
INSERT INTO `effect` VALUES ('plain_update','ended-0-again','0.1.0');
INSERT INTO `effect` VALUES ('plain_update','ended-1','0.1.0');
INSERT INTO `effect` VALUES ('plain_update','ended-2','0.1.0');
CREATE TABLE `full_update` (
  `id` int(11) NOT NULL AUTO_INCREMENT,
  `key` varchar(60) NOT NULL,
  `customer` varchar(60) NOT NULL DEFAULT 'a',
  `status` varchar(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL DEFAULT 'pending',
  `priority` smallint(6) NOT NULL DEFAULT 0,
  `run_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `attempts` int(11) NOT NULL DEFAULT 0,
  `max_attempts` smallint(6) DEFAULT NULL,
  `last_error` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `created_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `finished_at` datetime(6) DEFAULT NULL,
  `lease_token` uuid DEFAULT NULL,
  `lease_expires_at` datetime(6) DEFAULT NULL,
  `claimed_by` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `traceparent` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `sqlaqueue_unique` binary(32) GENERATED ALWAYS AS (case when `status` = 'pending' or `status` = 'processing' then unhex(sha2(convert(`key` using utf8mb4),256)) end) VIRTUAL INVISIBLE,
  PRIMARY KEY (`id`),
  UNIQUE KEY `ix_full_update_queue_unique` (`sqlaqueue_unique`),
  KEY `ix_full_update_queue_lease` (`status`,`lease_expires_at`),
  KEY `ix_full_update_queue_quarantined` (`status`,`lease_token`,`priority`,`run_at`,`id`),
  KEY `ix_full_update_queue_finished` (`status`,`finished_at`),
  KEY `ix_full_update_queue_running_customer` (`status`,`customer`),
  KEY `ix_full_update_queue_claim` (`status`,`priority`,`run_at`,`id`),
  KEY `ix_full_update_queue_turns` (`status`,`priority`,`customer`,`run_at`,`id`)
) ENGINE=InnoDB AUTO_INCREMENT=10 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `full_update` (`id`, `key`, `customer`, `status`, `priority`, `run_at`, `attempts`, `max_attempts`, `last_error`, `created_at`, `finished_at`, `lease_token`, `lease_expires_at`, `claimed_by`, `traceparent`, `sqlaqueue_unique`) VALUES (1,'failed','a','failed',0,'2026-11-30 12:19:47.798933',1,NULL,'Fail: it has to fail','2026-11-30 12:19:47.798933','2026-11-30 12:19:49.805734',NULL,NULL,NULL,NULL,NULL);
INSERT INTO `full_update` (`id`, `key`, `customer`, `status`, `priority`, `run_at`, `attempts`, `max_attempts`, `last_error`, `created_at`, `finished_at`, `lease_token`, `lease_expires_at`, `claimed_by`, `traceparent`, `sqlaqueue_unique`) VALUES (2,'ended-0-again','customer 0','completed',0,'2026-11-30 12:19:52.977880',2,NULL,NULL,'2026-11-30 12:19:51.396649','2026-11-30 12:19:53.008566',NULL,NULL,NULL,NULL,NULL);
INSERT INTO `full_update` (`id`, `key`, `customer`, `status`, `priority`, `run_at`, `attempts`, `max_attempts`, `last_error`, `created_at`, `finished_at`, `lease_token`, `lease_expires_at`, `claimed_by`, `traceparent`, `sqlaqueue_unique`) VALUES (3,'ended-1','customer 1','completed',0,'2026-11-30 12:19:51.412323',1,NULL,NULL,'2026-11-30 12:19:51.412323','2026-11-30 12:19:53.001486',NULL,NULL,NULL,NULL,NULL);
INSERT INTO `full_update` (`id`, `key`, `customer`, `status`, `priority`, `run_at`, `attempts`, `max_attempts`, `last_error`, `created_at`, `finished_at`, `lease_token`, `lease_expires_at`, `claimed_by`, `traceparent`, `sqlaqueue_unique`) VALUES (4,'ended-2','customer 2','completed',0,'2026-11-30 12:19:51.458839',1,NULL,NULL,'2026-11-30 12:19:51.458839','2026-11-30 12:19:53.005950',NULL,NULL,NULL,NULL,NULL);
INSERT INTO `full_update` (`id`, `key`, `customer`, `status`, `priority`, `run_at`, `attempts`, `max_attempts`, `last_error`, `created_at`, `finished_at`, `lease_token`, `lease_expires_at`, `claimed_by`, `traceparent`, `sqlaqueue_unique`) VALUES (5,'later','a','pending',0,'2200-01-01 00:00:00.000000',0,NULL,NULL,'2026-11-30 12:20:00.048257',NULL,NULL,NULL,NULL,NULL,0x1D9283D848EA941ACE1FE0D2378EF8B70056A0D4D1648B95A322D90163E78285);
INSERT INTO `full_update` (`id`, `key`, `customer`, `status`, `priority`, `run_at`, `attempts`, `max_attempts`, `last_error`, `created_at`, `finished_at`, `lease_token`, `lease_expires_at`, `claimed_by`, `traceparent`, `sqlaqueue_unique`) VALUES (6,'cancelled','a','cancelled',0,'2200-01-01 00:00:00.000000',0,NULL,NULL,'2026-11-30 12:20:00.048257','2026-11-30 12:20:00.173179',NULL,NULL,NULL,NULL,NULL);
INSERT INTO `full_update` (`id`, `key`, `customer`, `status`, `priority`, `run_at`, `attempts`, `max_attempts`, `last_error`, `created_at`, `finished_at`, `lease_token`, `lease_expires_at`, `claimed_by`, `traceparent`, `sqlaqueue_unique`) VALUES (7,'due-3','customer 0','pending',0,'2026-11-30 12:20:00.330191',0,NULL,NULL,'2026-11-30 12:20:00.330191',NULL,NULL,NULL,NULL,NULL,0x65931335F44231B38B0579DB4564CB02FA520FC764921255088ABD7217A87776);
INSERT INTO `full_update` (`id`, `key`, `customer`, `status`, `priority`, `run_at`, `attempts`, `max_attempts`, `last_error`, `created_at`, `finished_at`, `lease_token`, `lease_expires_at`, `claimed_by`, `traceparent`, `sqlaqueue_unique`) VALUES (8,'due-4-again','customer 1','processing',0,'2026-11-30 12:20:00.421729',1,NULL,NULL,'2026-11-30 12:20:00.421729',NULL,'d4ed2d4e-231e-40fd-8cb0-5514b24d3902','2026-01-01 00:00:00.000000','vm:14630',NULL,0xA52ABF8D8AA42C42044F382EADC95547D6D5418B5CF6C288AAEF35A44C0200E6);
INSERT INTO `full_update` (`id`, `key`, `customer`, `status`, `priority`, `run_at`, `attempts`, `max_attempts`, `last_error`, `created_at`, `finished_at`, `lease_token`, `lease_expires_at`, `claimed_by`, `traceparent`, `sqlaqueue_unique`) VALUES (9,'due-5','customer 2','pending',0,'2026-11-30 12:20:00.605575',0,NULL,NULL,'2026-11-30 12:20:00.605575',NULL,NULL,NULL,NULL,NULL,0xEAC9903EDF30562DBB5EB3B1BD4C746EC460D56D1D59EEB9713D4B6BE87AEF2E);
CREATE TABLE `import` (
  `id` int(11) NOT NULL AUTO_INCREMENT,
  `key` varchar(60) NOT NULL,
  `customer` varchar(60) NOT NULL DEFAULT 'a',
  `status` varchar(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL DEFAULT 'waiting',
  `priority` smallint(6) NOT NULL DEFAULT 0,
  `run_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `attempts` int(11) NOT NULL DEFAULT 0,
  `max_attempts` smallint(6) DEFAULT NULL,
  `last_error` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `created_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `finished_at` datetime(6) DEFAULT NULL,
  `lease_token` uuid DEFAULT NULL,
  `lease_expires_at` datetime(6) DEFAULT NULL,
  `claimed_by` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `waits_for_count` int(11) DEFAULT 1,
  PRIMARY KEY (`id`),
  KEY `ix_import_queue_quarantined` (`status`,`lease_token`,`priority`,`run_at`,`id`),
  KEY `ix_import_queue_waiting` (`status`,`id`),
  KEY `ix_import_queue_lease` (`status`,`lease_expires_at`),
  KEY `ix_import_queue_claim` (`status`,`priority`,`run_at`,`id`)
) ENGINE=InnoDB AUTO_INCREMENT=7 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `import` VALUES (1,'ended-0-again','a','completed',0,'2026-11-30 12:19:56.133971',2,NULL,NULL,'2026-11-30 12:19:51.404002','2026-11-30 12:19:56.583247',NULL,NULL,NULL,0);
INSERT INTO `import` VALUES (2,'ended-1','a','completed',0,'2026-11-30 12:19:55.818677',1,NULL,NULL,'2026-11-30 12:19:51.414986','2026-11-30 12:19:56.106806',NULL,NULL,NULL,0);
INSERT INTO `import` VALUES (3,'ended-2','a','completed',0,'2026-11-30 12:19:55.818677',1,NULL,NULL,'2026-11-30 12:19:51.489815','2026-11-30 12:19:56.113373',NULL,NULL,NULL,0);
INSERT INTO `import` VALUES (4,'due-3','a','waiting',0,'2026-11-30 12:20:00.370279',0,NULL,NULL,'2026-11-30 12:20:00.370279',NULL,NULL,NULL,NULL,1);
INSERT INTO `import` VALUES (5,'due-4-again','a','waiting',0,'2026-11-30 12:20:00.448367',0,NULL,NULL,'2026-11-30 12:20:00.448367',NULL,NULL,NULL,NULL,1);
INSERT INTO `import` VALUES (6,'due-5','a','waiting',0,'2026-11-30 12:20:00.634508',0,NULL,NULL,'2026-11-30 12:20:00.634508',NULL,NULL,NULL,NULL,1);
CREATE TABLE `line` (
  `import_id` int(11) DEFAULT NULL,
  `id` int(11) NOT NULL AUTO_INCREMENT,
  `key` varchar(60) NOT NULL,
  `customer` varchar(60) NOT NULL DEFAULT 'a',
  `status` varchar(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL DEFAULT 'pending',
  `priority` smallint(6) NOT NULL DEFAULT 0,
  `run_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `attempts` int(11) NOT NULL DEFAULT 0,
  `max_attempts` smallint(6) DEFAULT NULL,
  `last_error` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `created_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `finished_at` datetime(6) DEFAULT NULL,
  `lease_token` uuid DEFAULT NULL,
  `lease_expires_at` datetime(6) DEFAULT NULL,
  `claimed_by` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  PRIMARY KEY (`id`),
  KEY `ix_line_import_id` (`import_id`),
  KEY `ix_line_queue_quarantined` (`status`,`lease_token`,`priority`,`run_at`,`id`),
  KEY `ix_line_queue_claim` (`status`,`priority`,`run_at`,`id`),
  KEY `ix_line_queue_lease` (`status`,`lease_expires_at`),
  CONSTRAINT `line_ibfk_1` FOREIGN KEY (`import_id`) REFERENCES `import` (`id`)
) ENGINE=InnoDB AUTO_INCREMENT=13 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `line` VALUES (1,1,'ended-0-again.1','a','completed',0,'2026-11-30 12:19:51.407850',1,NULL,NULL,'2026-11-30 12:19:51.407850','2026-11-30 12:19:55.028738',NULL,NULL,NULL);
INSERT INTO `line` VALUES (1,2,'ended-0-again.2','a','completed',0,'2026-11-30 12:19:51.407850',1,NULL,NULL,'2026-11-30 12:19:51.407850','2026-11-30 12:19:55.071548',NULL,NULL,NULL);
INSERT INTO `line` VALUES (2,3,'ended-1.1','a','completed',0,'2026-11-30 12:19:51.438528',1,NULL,NULL,'2026-11-30 12:19:51.438528','2026-11-30 12:19:55.072609',NULL,NULL,NULL);
INSERT INTO `line` VALUES (2,4,'ended-1.2','a','completed',0,'2026-11-30 12:19:51.438528',1,NULL,NULL,'2026-11-30 12:19:51.438528','2026-11-30 12:19:55.073646',NULL,NULL,NULL);
INSERT INTO `line` VALUES (3,5,'ended-2.1','a','completed',0,'2026-11-30 12:19:51.490763',1,NULL,NULL,'2026-11-30 12:19:51.490763','2026-11-30 12:19:55.074673',NULL,NULL,NULL);
INSERT INTO `line` VALUES (3,6,'ended-2.2','a','completed',0,'2026-11-30 12:19:51.490763',1,NULL,NULL,'2026-11-30 12:19:51.490763','2026-11-30 12:19:55.076078',NULL,NULL,NULL);
INSERT INTO `line` VALUES (4,7,'due-3.1','a','pending',0,'2026-11-30 12:20:00.384457',0,NULL,NULL,'2026-11-30 12:20:00.384457',NULL,NULL,NULL,NULL);
INSERT INTO `line` VALUES (4,8,'due-3.2','a','pending',0,'2026-11-30 12:20:00.384457',0,NULL,NULL,'2026-11-30 12:20:00.384457',NULL,NULL,NULL,NULL);
INSERT INTO `line` VALUES (5,9,'due-4-again.1','a','pending',0,'2026-11-30 12:20:00.554348',0,NULL,NULL,'2026-11-30 12:20:00.554348',NULL,NULL,NULL,NULL);
INSERT INTO `line` VALUES (5,10,'due-4-again.2','a','pending',0,'2026-11-30 12:20:00.554348',0,NULL,NULL,'2026-11-30 12:20:00.554348',NULL,NULL,NULL,NULL);
INSERT INTO `line` VALUES (6,11,'due-5.1','a','pending',0,'2026-11-30 12:20:00.642925',0,NULL,NULL,'2026-11-30 12:20:00.642925',NULL,NULL,NULL,NULL);
INSERT INTO `line` VALUES (6,12,'due-5.2','a','pending',0,'2026-11-30 12:20:00.642925',0,NULL,NULL,'2026-11-30 12:20:00.642925',NULL,NULL,NULL,NULL);
/*!50003 SET @saved_cs_client      = @@character_set_client */ ;
/*!50003 SET @saved_cs_results     = @@character_set_results */ ;
/*!50003 SET @saved_col_connection = @@collation_connection */ ;
/*!50003 SET character_set_client  = utf8mb4 */ ;
/*!50003 SET character_set_results = utf8mb4 */ ;
/*!50003 SET collation_connection  = utf8mb4_general_ci */ ;
/*!50003 SET @saved_sql_mode       = @@sql_mode */ ;
/*!50003 SET sql_mode              = 'STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_AUTO_CREATE_USER,NO_ENGINE_SUBSTITUTION' */ ;
DELIMITER ;;
/*!50003 CREATE*/ /*!50017 DEFINER=`root`@`localhost`*/ /*!50003 TRIGGER sqlaqueue_waits_import_lines_late_insert_2aae2e21 BEFORE INSERT ON line FOR EACH ROW BEGIN DECLARE sqlaqueue_begun BOOLEAN; IF NEW.import_id IS NOT NULL AND coalesce(NEW.status = 'completed' OR NEW.status = 'failed' OR NEW.status = 'cancelled', false) = 0 THEN SET sqlaqueue_begun = (SELECT coalesce(sqlaqueue_batch.status = 'waiting' OR sqlaqueue_batch.status = 'pending', false) = 0 AS coalesce_1 
FROM import AS sqlaqueue_batch 
WHERE sqlaqueue_batch.id = NEW.import_id LOCK IN SHARE MODE); IF sqlaqueue_begun THEN SIGNAL SQLSTATE '23000' SET MYSQL_ERRNO = 4025, MESSAGE_TEXT = 'Import has started or ended: it takes no further Line'; END IF; END IF; END 
*/;;
DELIMITER ;
/*!50003 SET sql_mode              = @saved_sql_mode */ ;
/*!50003 SET character_set_client  = @saved_cs_client */ ;
/*!50003 SET character_set_results = @saved_cs_results */ ;
/*!50003 SET collation_connection  = @saved_col_connection */ ;
/*!50003 SET @saved_cs_client      = @@character_set_client */ ;
/*!50003 SET @saved_cs_results     = @@character_set_results */ ;
/*!50003 SET @saved_col_connection = @@collation_connection */ ;
/*!50003 SET character_set_client  = utf8mb4 */ ;
/*!50003 SET character_set_results = utf8mb4 */ ;
/*!50003 SET collation_connection  = utf8mb4_general_ci */ ;
/*!50003 SET @saved_sql_mode       = @@sql_mode */ ;
/*!50003 SET sql_mode              = 'STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_AUTO_CREATE_USER,NO_ENGINE_SUBSTITUTION' */ ;
DELIMITER ;;
/*!50003 CREATE*/ /*!50017 DEFINER=`root`@`localhost`*/ /*!50003 TRIGGER sqlaqueue_waits_import_lines_late_update_9b3a16a3 BEFORE UPDATE ON line FOR EACH ROW BEGIN DECLARE sqlaqueue_begun BOOLEAN; IF NEW.import_id IS NOT NULL AND coalesce(NEW.status = 'completed' OR NEW.status = 'failed' OR NEW.status = 'cancelled', false) = 0 AND NOT (OLD.import_id <=> NEW.import_id) THEN SET sqlaqueue_begun = (SELECT coalesce(sqlaqueue_batch.status = 'waiting' OR sqlaqueue_batch.status = 'pending', false) = 0 AS coalesce_1 
FROM import AS sqlaqueue_batch 
WHERE sqlaqueue_batch.id = NEW.import_id LOCK IN SHARE MODE); IF sqlaqueue_begun THEN SIGNAL SQLSTATE '23000' SET MYSQL_ERRNO = 4025, MESSAGE_TEXT = 'Import has started or ended: it takes no further Line'; END IF; END IF; END 
*/;;
DELIMITER ;
/*!50003 SET sql_mode              = @saved_sql_mode */ ;
/*!50003 SET character_set_client  = @saved_cs_client */ ;
/*!50003 SET character_set_results = @saved_cs_results */ ;
/*!50003 SET collation_connection  = @saved_col_connection */ ;
CREATE TABLE `ordered` (
  `id` int(11) NOT NULL AUTO_INCREMENT,
  `key` varchar(60) NOT NULL,
  `customer` varchar(60) NOT NULL DEFAULT 'a',
  `status` varchar(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL DEFAULT 'pending',
  `priority` smallint(6) NOT NULL DEFAULT 0,
  `run_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `attempts` int(11) NOT NULL DEFAULT 0,
  `max_attempts` smallint(6) DEFAULT NULL,
  `last_error` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `created_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `finished_at` datetime(6) DEFAULT NULL,
  `lease_token` uuid DEFAULT NULL,
  `lease_expires_at` datetime(6) DEFAULT NULL,
  `claimed_by` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `started_at` datetime(6) DEFAULT NULL,
  PRIMARY KEY (`id`),
  KEY `ix_ordered_queue_quarantined` (`status`,`lease_token`,`priority`,`run_at`,`id`),
  KEY `ix_ordered_queue_claim` (`status`,`priority`,`run_at`,`id`),
  KEY `ix_ordered_queue_running_customer` (`status`,`customer`),
  KEY `ix_ordered_queue_lease` (`status`,`lease_expires_at`),
  KEY `ix_ordered_queue_order` (`status`,`customer`,`id`)
) ENGINE=InnoDB AUTO_INCREMENT=10 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `ordered` VALUES (1,'failed','a','failed',0,'2026-11-30 12:19:47.828623',1,NULL,'Fail: it has to fail','2026-11-30 12:19:47.828623','2026-11-30 12:19:51.090382',NULL,NULL,'vm:14630','2026-11-30 12:19:51.072082');
INSERT INTO `ordered` VALUES (2,'ended-0-again','customer 0','completed',0,'2026-11-30 12:19:54.461335',2,NULL,NULL,'2026-11-30 12:19:51.400120','2026-11-30 12:19:54.542965',NULL,NULL,'vm:14630','2026-11-30 12:19:54.540498');
INSERT INTO `ordered` VALUES (3,'ended-1','customer 1','completed',0,'2026-11-30 12:19:51.415720',1,NULL,NULL,'2026-11-30 12:19:51.415720','2026-11-30 12:19:54.519578',NULL,NULL,'vm:14630','2026-11-30 12:19:54.435337');
INSERT INTO `ordered` VALUES (4,'ended-2','customer 2','completed',0,'2026-11-30 12:19:51.487585',1,NULL,NULL,'2026-11-30 12:19:51.487585','2026-11-30 12:19:54.523563',NULL,NULL,'vm:14630','2026-11-30 12:19:54.435337');
INSERT INTO `ordered` VALUES (5,'later','a','pending',0,'2200-01-01 00:00:00.000000',0,NULL,NULL,'2026-11-30 12:20:00.051550',NULL,NULL,NULL,NULL,NULL);
INSERT INTO `ordered` VALUES (6,'cancelled','a','cancelled',0,'2200-01-01 00:00:00.000000',0,NULL,NULL,'2026-11-30 12:20:00.051550','2026-11-30 12:20:00.249511',NULL,NULL,NULL,NULL);
INSERT INTO `ordered` VALUES (7,'due-3','customer 0','processing',0,'2026-11-30 12:20:00.371988',1,NULL,NULL,'2026-11-30 12:20:00.371988',NULL,'0855612a-3aa4-4768-8dfc-8265c570d041','2026-01-01 00:00:00.000000','vm:14630','2026-11-30 12:20:01.695676');
INSERT INTO `ordered` VALUES (8,'due-4-again','customer 1','pending',0,'2026-11-30 12:20:00.430100',0,NULL,NULL,'2026-11-30 12:20:00.430100',NULL,NULL,NULL,NULL,NULL);
INSERT INTO `ordered` VALUES (9,'due-5','customer 2','pending',0,'2026-11-30 12:20:00.637650',0,NULL,NULL,'2026-11-30 12:20:00.637650',NULL,NULL,NULL,NULL,NULL);
CREATE TABLE `plain_update` (
  `id` int(11) NOT NULL AUTO_INCREMENT,
  `key` varchar(60) NOT NULL,
  `customer` varchar(60) NOT NULL DEFAULT 'a',
  `status` varchar(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL DEFAULT 'pending',
  `priority` smallint(6) NOT NULL DEFAULT 0,
  `run_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `attempts` int(11) NOT NULL DEFAULT 0,
  `max_attempts` smallint(6) DEFAULT NULL,
  `last_error` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `created_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `finished_at` datetime(6) DEFAULT NULL,
  `lease_token` uuid DEFAULT NULL,
  `lease_expires_at` datetime(6) DEFAULT NULL,
  `claimed_by` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  PRIMARY KEY (`id`),
  KEY `ix_plain_update_queue_quarantined` (`status`,`lease_token`,`priority`,`run_at`,`id`),
  KEY `ix_plain_update_queue_claim` (`status`,`priority`,`run_at`,`id`),
  KEY `ix_plain_update_queue_lease` (`status`,`lease_expires_at`)
) ENGINE=InnoDB AUTO_INCREMENT=10 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `plain_update` VALUES (1,'failed','a','failed',0,'2026-11-30 12:19:47.838791',1,NULL,'Fail: it has to fail','2026-11-30 12:19:47.838791','2026-11-30 12:19:48.931602',NULL,NULL,NULL);
INSERT INTO `plain_update` VALUES (2,'ended-0-again','customer 0','completed',0,'2026-11-30 12:19:52.588332',2,NULL,NULL,'2026-11-30 12:19:51.386299','2026-11-30 12:19:52.601937',NULL,NULL,NULL);
INSERT INTO `plain_update` VALUES (3,'ended-1','customer 1','completed',0,'2026-11-30 12:19:51.404804',1,NULL,NULL,'2026-11-30 12:19:51.404804','2026-11-30 12:19:52.595674',NULL,NULL,NULL);
INSERT INTO `plain_update` VALUES (4,'ended-2','customer 2','completed',0,'2026-11-30 12:19:51.444669',1,NULL,NULL,'2026-11-30 12:19:51.444669','2026-11-30 12:19:52.597651',NULL,NULL,NULL);
INSERT INTO `plain_update` VALUES (5,'later','a','pending',0,'2200-01-01 00:00:00.000000',0,NULL,NULL,'2026-11-30 12:20:00.054567',NULL,NULL,NULL,NULL);
INSERT INTO `plain_update` VALUES (6,'cancelled','a','cancelled',0,'2200-01-01 00:00:00.000000',0,NULL,NULL,'2026-11-30 12:20:00.054567','2026-11-30 12:20:00.092324',NULL,NULL,NULL);
INSERT INTO `plain_update` VALUES (7,'due-3','customer 0','processing',0,'2026-11-30 12:20:00.300322',1,NULL,NULL,'2026-11-30 12:20:00.300322',NULL,'932bc4d4-e009-4997-a66a-56e80614315d','2026-01-01 00:00:00.000000','vm:14630');
INSERT INTO `plain_update` VALUES (8,'due-4-again','customer 1','pending',0,'2026-11-30 12:20:00.386487',0,NULL,NULL,'2026-11-30 12:20:00.386487',NULL,NULL,NULL,NULL);
INSERT INTO `plain_update` VALUES (9,'due-5','customer 2','pending',0,'2026-11-30 12:20:00.510142',0,NULL,NULL,'2026-11-30 12:20:00.510142',NULL,NULL,NULL,NULL);
CREATE TABLE `sent` (
  `queue` varchar(60) NOT NULL,
  `key` varchar(60) NOT NULL,
  PRIMARY KEY (`queue`,`key`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `sent` VALUES ('call','due-3');
INSERT INTO `sent` VALUES ('call','due-4-again');
INSERT INTO `sent` VALUES ('call','due-5');
INSERT INTO `sent` VALUES ('call','ended-0-again');
INSERT INTO `sent` VALUES ('call','ended-1');
INSERT INTO `sent` VALUES ('call','ended-2');
INSERT INTO `sent` VALUES ('full_update','due-3');
INSERT INTO `sent` VALUES ('full_update','due-4-again');
INSERT INTO `sent` VALUES ('full_update','due-5');
INSERT INTO `sent` VALUES ('full_update','ended-0-again');
INSERT INTO `sent` VALUES ('full_update','ended-1');
INSERT INTO `sent` VALUES ('full_update','ended-2');
INSERT INTO `sent` VALUES ('import','due-3');
INSERT INTO `sent` VALUES ('import','due-4-again');
INSERT INTO `sent` VALUES ('import','due-5');
INSERT INTO `sent` VALUES ('import','ended-0-again');
INSERT INTO `sent` VALUES ('import','ended-1');
INSERT INTO `sent` VALUES ('import','ended-2');
INSERT INTO `sent` VALUES ('line','due-3.1');
INSERT INTO `sent` VALUES ('line','due-3.2');
INSERT INTO `sent` VALUES ('line','due-4-again.1');
INSERT INTO `sent` VALUES ('line','due-4-again.2');
INSERT INTO `sent` VALUES ('line','due-5.1');
INSERT INTO `sent` VALUES ('line','due-5.2');
INSERT INTO `sent` VALUES ('line','ended-0-again.1');
INSERT INTO `sent` VALUES ('line','ended-0-again.2');
INSERT INTO `sent` VALUES ('line','ended-1.1');
INSERT INTO `sent` VALUES ('line','ended-1.2');
INSERT INTO `sent` VALUES ('line','ended-2.1');
INSERT INTO `sent` VALUES ('line','ended-2.2');
INSERT INTO `sent` VALUES ('ordered','due-3');
INSERT INTO `sent` VALUES ('ordered','due-4-again');
INSERT INTO `sent` VALUES ('ordered','due-5');
INSERT INTO `sent` VALUES ('ordered','ended-0-again');
INSERT INTO `sent` VALUES ('ordered','ended-1');
INSERT INTO `sent` VALUES ('ordered','ended-2');
INSERT INTO `sent` VALUES ('plain_update','due-3');
INSERT INTO `sent` VALUES ('plain_update','due-4-again');
INSERT INTO `sent` VALUES ('plain_update','due-5');
INSERT INTO `sent` VALUES ('plain_update','ended-0-again');
INSERT INTO `sent` VALUES ('plain_update','ended-1');
INSERT INTO `sent` VALUES ('plain_update','ended-2');
CREATE TABLE `sqlaqueue_attempt` (
  `id` bigint(20) NOT NULL AUTO_INCREMENT,
  `queue` varchar(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `key` varchar(512) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `attempt` int(11) NOT NULL,
  `started_at` datetime(6) DEFAULT NULL,
  `ended_at` datetime(6) NOT NULL,
  `worker` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `outcome` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `error` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `traceback` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  PRIMARY KEY (`id`),
  KEY `ix_sqlaqueue_attempt_ended` (`queue`,`ended_at`),
  KEY `ix_sqlaqueue_attempt_job` (`queue`,`key`)
) ENGINE=InnoDB AUTO_INCREMENT=6 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `sqlaqueue_attempt` VALUES (1,'full_update','[1]',1,'2026-11-30 12:19:49.801500','2026-11-30 12:19:49.801594','vm:14630','failed','Fail: it has to fail','Traceback (most recent call last):\n  File \"/tmp/w_u/tests/upgrades/program.py\", line 234, in fail\n    raise Fail(\"it has to fail\")\nsqlaqueue.exc.Fail: it has to fail\n');
INSERT INTO `sqlaqueue_attempt` VALUES (2,'full_update','[2]',1,'2026-11-30 12:19:52.922869','2026-11-30 12:19:52.925835','vm:14630','retried',NULL,'Traceback (most recent call last):\n  File \"/tmp/w_u/tests/upgrades/program.py\", line 193, in run\n    raise Retry(0.05)\nsqlaqueue.exc.Retry: retry requested by the handler\n');
INSERT INTO `sqlaqueue_attempt` VALUES (3,'full_update','[3]',1,'2026-11-30 12:19:53.001569','2026-11-30 12:19:53.002430','vm:14630','completed',NULL,NULL);
INSERT INTO `sqlaqueue_attempt` VALUES (4,'full_update','[4]',1,'2026-11-30 12:19:53.005965','2026-11-30 12:19:53.006518','vm:14630','completed',NULL,NULL);
INSERT INTO `sqlaqueue_attempt` VALUES (5,'full_update','[2]',2,'2026-11-30 12:19:53.008591','2026-11-30 12:19:53.009061','vm:14630','completed',NULL,NULL);
CREATE TABLE `sqlaqueue_consumer` (
  `id` varchar(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `queue` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `name` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `host` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `pid` int(11) NOT NULL,
  `version` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `listening` tinyint(1) NOT NULL,
  `running` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `claimed` int(11) NOT NULL DEFAULT 0,
  `unclaimable` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL DEFAULT '[]',
  `heartbeat_at` datetime(6) NOT NULL,
  `expires_at` datetime(6) NOT NULL,
  `created_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  PRIMARY KEY (`id`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `sqlaqueue_consumer` VALUES ('1','plain_update','dead:1','dead',1,'0.1.0',1,'[]',0,'[]','2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000','2026-11-30 12:20:01.709929');
CREATE TABLE `sqlaqueue_control` (
  `queue` varchar(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `key` varchar(512) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `created_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  PRIMARY KEY (`queue`,`key`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `sqlaqueue_control` VALUES ('plain_update','[]','2026-11-30 12:20:01.716403');
INSERT INTO `sqlaqueue_control` VALUES ('sqlaqueue_pause plain_update','[\"the upgrade\", \"ada\"]','2026-11-30 12:20:01.716403');
CREATE TABLE `sqlaqueue_minute` (
  `queue` varchar(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `minute` int(11) NOT NULL,
  `pending` int(11) DEFAULT NULL,
  `due` int(11) DEFAULT NULL,
  `oldest_due` int(11) DEFAULT NULL,
  `completed` int(11) DEFAULT NULL,
  `retried` int(11) DEFAULT NULL,
  `failed` int(11) DEFAULT NULL,
  `cancelled` int(11) DEFAULT NULL,
  `wait_0` int(11) DEFAULT NULL,
  `wait_1` int(11) DEFAULT NULL,
  `wait_2` int(11) DEFAULT NULL,
  `wait_3` int(11) DEFAULT NULL,
  `wait_4` int(11) DEFAULT NULL,
  `wait_5` int(11) DEFAULT NULL,
  `wait_6` int(11) DEFAULT NULL,
  `wait_7` int(11) DEFAULT NULL,
  `wait_8` int(11) DEFAULT NULL,
  `wait_9` int(11) DEFAULT NULL,
  `wait_10` int(11) DEFAULT NULL,
  `wait_11` int(11) DEFAULT NULL,
  `wait_12` int(11) DEFAULT NULL,
  `wait_13` int(11) DEFAULT NULL,
  `wait_14` int(11) DEFAULT NULL,
  `wait_15` int(11) DEFAULT NULL,
  `wait_16` int(11) DEFAULT NULL,
  `wait_17` int(11) DEFAULT NULL,
  `wait_18` int(11) DEFAULT NULL,
  `wait_19` int(11) DEFAULT NULL,
  `wait_20` int(11) DEFAULT NULL,
  `run_0` int(11) DEFAULT NULL,
  `run_1` int(11) DEFAULT NULL,
  `run_2` int(11) DEFAULT NULL,
  `run_3` int(11) DEFAULT NULL,
  `run_4` int(11) DEFAULT NULL,
  `run_5` int(11) DEFAULT NULL,
  `run_6` int(11) DEFAULT NULL,
  `run_7` int(11) DEFAULT NULL,
  `run_8` int(11) DEFAULT NULL,
  `run_9` int(11) DEFAULT NULL,
  `run_10` int(11) DEFAULT NULL,
  `run_11` int(11) DEFAULT NULL,
  `run_12` int(11) DEFAULT NULL,
  `run_13` int(11) DEFAULT NULL,
  `run_14` int(11) DEFAULT NULL,
  `run_15` int(11) DEFAULT NULL,
  `run_16` int(11) DEFAULT NULL,
  `run_17` int(11) DEFAULT NULL,
  `run_18` int(11) DEFAULT NULL,
  `run_19` int(11) DEFAULT NULL,
  `run_20` int(11) DEFAULT NULL,
  PRIMARY KEY (`queue`,`minute`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `sqlaqueue_minute` VALUES ('full_update',29934019,0,0,NULL,3,1,1,NULL,NULL,NULL,NULL,NULL,1,NULL,NULL,NULL,NULL,4,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,4,1,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE `sqlaqueue_rate` (
  `queue` varchar(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `rate` varchar(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `key` bigint(20) NOT NULL,
  `next_at` datetime(6) NOT NULL,
  `throttled_until` datetime(6) DEFAULT NULL,
  PRIMARY KEY (`queue`,`rate`,`key`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `sqlaqueue_rate` VALUES ('full_update','/1s',0,'2026-11-30 12:20:01.253917',NULL);
CREATE TABLE `sqlaqueue_schedule` (
  `name` varchar(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `queue` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `model` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `cron` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `every` double DEFAULT NULL,
  `timezone` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL DEFAULT 'UTC',
  `values` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL DEFAULT '{}',
  `factory` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `jitter` double NOT NULL DEFAULT 0,
  `catch_up` int(11) NOT NULL DEFAULT 1,
  `misfire_grace` double DEFAULT NULL,
  `skip_unfinished` tinyint(1) NOT NULL DEFAULT 0,
  `paused_at` datetime(6) DEFAULT NULL,
  `run_requested_at` datetime(6) DEFAULT NULL,
  `last_tick` datetime(6) DEFAULT NULL,
  `next_tick` datetime(6) DEFAULT NULL,
  `last_job` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `edited_at` datetime(6) DEFAULT NULL,
  `planned_for` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `planned_at` datetime(6) DEFAULT NULL,
  `rules` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `code` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `last_error` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `created_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  PRIMARY KEY (`name`),
  CONSTRAINT `ck_sqlaqueue_schedule_cron_or_every` CHECK (`cron` is null <> (`every` is null)),
  CONSTRAINT `ck_sqlaqueue_schedule_every` CHECK (`every` between 1 and 3155760000),
  CONSTRAINT `ck_sqlaqueue_schedule_spans` CHECK (`misfire_grace` between 0 and 3155760000 and `jitter` between 0 and 3155760000),
  CONSTRAINT `ck_sqlaqueue_schedule_catch_up` CHECK (`catch_up` between 0 and 1000),
  CONSTRAINT `ck_sqlaqueue_schedule_moments` CHECK ((`created_at` is null or `created_at` > '1970-01-01 00:00:00.000000' and `created_at` < '9000-01-01 00:00:00.000000') and (`paused_at` is null or `paused_at` > '1970-01-01 00:00:00.000000' and `paused_at` < '9000-01-01 00:00:00.000000') and (`run_requested_at` is null or `run_requested_at` > '1970-01-01 00:00:00.000000' and `run_requested_at` < '9000-01-01 00:00:00.000000') and (`last_tick` is null or `last_tick` > '1970-01-01 00:00:00.000000' and `last_tick` < '9000-01-01 00:00:00.000000') and (`next_tick` is null or `next_tick` > '1970-01-01 00:00:00.000000' and `next_tick` < '9000-01-01 00:00:00.000000') and (`edited_at` is null or `edited_at` > '1970-01-01 00:00:00.000000' and `edited_at` < '9000-01-01 00:00:00.000000'))
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `sqlaqueue_schedule` VALUES ('ticked','ticked','Ticked',NULL,1,'UTC','{\"key\": \"tick\"}',NULL,0,1000,3600,0,NULL,NULL,'2026-11-30 12:19:59.000000','2026-11-30 12:20:00.000000','[3]',NULL,'1|UTC','2026-11-30 12:19:59.953516',NULL,'{\"queue\": \"ticked\", \"model\": \"Ticked\", \"cron\": null, \"every\": 1.0, \"timezone\": \"UTC\", \"values\": {\"key\": \"tick\"}, \"factory\": null, \"jitter\": 0.0, \"catch_up\": 1000, \"misfire_grace\": 3600.0, \"skip_unfinished\": false}',NULL,'2026-11-30 12:19:56.617076');
/*!50003 SET @saved_cs_client      = @@character_set_client */ ;
/*!50003 SET @saved_cs_results     = @@character_set_results */ ;
/*!50003 SET @saved_col_connection = @@collation_connection */ ;
/*!50003 SET character_set_client  = utf8mb4 */ ;
/*!50003 SET character_set_results = utf8mb4 */ ;
/*!50003 SET collation_connection  = utf8mb4_general_ci */ ;
/*!50003 SET @saved_sql_mode       = @@sql_mode */ ;
/*!50003 SET sql_mode              = 'STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_AUTO_CREATE_USER,NO_ENGINE_SUBSTITUTION' */ ;
DELIMITER ;;
/*!50003 CREATE*/ /*!50017 DEFINER=`root`@`localhost`*/ /*!50003 TRIGGER sqlaqueue_schedule_changed BEFORE UPDATE ON sqlaqueue_schedule FOR EACH ROW SET NEW.edited_at = IF(NOT (OLD.cron <=> NEW.cron) OR NOT (OLD.every <=> NEW.every) OR NOT (OLD.timezone <=> NEW.timezone) OR NOT (OLD.paused_at <=> NEW.paused_at), UTC_TIMESTAMP(6), NEW.edited_at), NEW.next_tick = IF((NOT (OLD.cron <=> NEW.cron) OR NOT (OLD.every <=> NEW.every) OR NOT (OLD.timezone <=> NEW.timezone) OR NOT (OLD.paused_at <=> NEW.paused_at)) AND NEW.paused_at IS NOT NULL, NULL, NEW.next_tick) 
*/;;
DELIMITER ;
/*!50003 SET sql_mode              = @saved_sql_mode */ ;
/*!50003 SET character_set_client  = @saved_cs_client */ ;
/*!50003 SET character_set_results = @saved_cs_results */ ;
/*!50003 SET collation_connection  = @saved_col_connection */ ;
CREATE TABLE `sqlaqueue_tick` (
  `schedule` varchar(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `tick` datetime(6) NOT NULL,
  `queue` varchar(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `key` varchar(512) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `fired_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  PRIMARY KEY (`schedule`,`tick`),
  KEY `ix_sqlaqueue_tick_job` (`queue`,`key`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `sqlaqueue_tick` VALUES ('ticked','2026-11-30 12:19:57.000000','ticked','[1]','2026-11-30 12:19:59.998490');
INSERT INTO `sqlaqueue_tick` VALUES ('ticked','2026-11-30 12:19:58.000000','ticked','[2]','2026-11-30 12:19:59.998490');
INSERT INTO `sqlaqueue_tick` VALUES ('ticked','2026-11-30 12:19:59.000000','ticked','[3]','2026-11-30 12:19:59.998490');
CREATE TABLE `sqlaqueue_waits_import` (
  `xact` bigint(20) NOT NULL,
  `id` bigint(20) NOT NULL,
  `relation` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  `keys` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
  PRIMARY KEY (`xact`,`id`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
CREATE TABLE `ticked` (
  `id` int(11) NOT NULL AUTO_INCREMENT,
  `key` varchar(60) NOT NULL,
  `customer` varchar(60) NOT NULL DEFAULT 'a',
  `status` varchar(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL DEFAULT 'pending',
  `priority` smallint(6) NOT NULL DEFAULT 0,
  `run_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `attempts` int(11) NOT NULL DEFAULT 0,
  `max_attempts` smallint(6) DEFAULT NULL,
  `last_error` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  `created_at` datetime(6) NOT NULL DEFAULT utc_timestamp(6),
  `finished_at` datetime(6) DEFAULT NULL,
  `lease_token` uuid DEFAULT NULL,
  `lease_expires_at` datetime(6) DEFAULT NULL,
  `claimed_by` longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT NULL,
  PRIMARY KEY (`id`),
  KEY `ix_ticked_queue_claim` (`status`,`priority`,`run_at`,`id`),
  KEY `ix_ticked_queue_quarantined` (`status`,`lease_token`,`priority`,`run_at`,`id`),
  KEY `ix_ticked_queue_lease` (`status`,`lease_expires_at`)
) ENGINE=InnoDB AUTO_INCREMENT=4 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci;
INSERT INTO `ticked` VALUES (1,'tick','a','pending',0,'2026-11-30 12:19:57.000000',0,NULL,NULL,'2026-11-30 12:19:59.978555',NULL,NULL,NULL,NULL);
INSERT INTO `ticked` VALUES (2,'tick','a','pending',0,'2026-11-30 12:19:58.000000',0,NULL,NULL,'2026-11-30 12:19:59.978555',NULL,NULL,NULL,NULL);
INSERT INTO `ticked` VALUES (3,'tick','a','pending',0,'2026-11-30 12:19:59.000000',0,NULL,NULL,'2026-11-30 12:19:59.978555',NULL,NULL,NULL,NULL);
