CREATE TABLE longrein_schema (version INTEGER NOT NULL);
CREATE TABLE rollouts (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	rollout_id TEXT NOT NULL,
	group_id TEXT,
	is_train BOOLEAN NOT NULL,
	input TEXT NOT NULL,
	config TEXT NOT NULL,
	metadata TEXT NOT NULL,
	state TEXT NOT NULL,
	k8s_job_name TEXT,
	last_attempt_id TEXT,
	error_message TEXT,
	version INTEGER NOT NULL,
	created_at DOUBLE NOT NULL,
	updated_at DOUBLE NOT NULL,
	UNIQUE (rollout_id)
);
CREATE INDEX rollouts_by_state ON rollouts (state, position);
CREATE TABLE terminal (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	rollout_id TEXT NOT NULL,
	UNIQUE (rollout_id)
);
CREATE TABLE attempts (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	rollout_id TEXT NOT NULL,
	attempt_id TEXT NOT NULL,
	token_hash BLOB,
	started_at DOUBLE NOT NULL,
	ended_at DOUBLE,
	outcome TEXT,
	exit_code INTEGER,
	reason TEXT,
	usage TEXT,
	UNIQUE (rollout_id, attempt_id),
	UNIQUE (token_hash)
);
CREATE TABLE calls (
	rollout_id TEXT NOT NULL,
	attempt_id TEXT NOT NULL,
	number INTEGER NOT NULL,
	dialect TEXT NOT NULL,
	mode TEXT NOT NULL,
	model TEXT NOT NULL,
	engine TEXT NOT NULL,
	kind TEXT NOT NULL,
	parent INTEGER,
	fork TEXT,
	prefix INTEGER,
	prefix_length INTEGER NOT NULL,
	prompt_delta BLOB NOT NULL,
	prompt_length INTEGER NOT NULL,
	sampled BLOB NOT NULL,
	logprobs BLOB,
	versions TEXT NOT NULL,
	messages_keep INTEGER NOT NULL,
	messages TEXT NOT NULL,
	tools TEXT,
	reply TEXT NOT NULL,
	sampling TEXT NOT NULL,
	status TEXT NOT NULL,
	finish_reason TEXT,
	http_status INTEGER NOT NULL,
	error TEXT,
	started_at DOUBLE NOT NULL,
	first_token_at DOUBLE,
	finished_at DOUBLE NOT NULL,
	PRIMARY KEY (rollout_id, attempt_id, number)
);
CREATE TABLE events (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	rollout_id TEXT NOT NULL,
	attempt_id TEXT NOT NULL,
	event_type TEXT NOT NULL,
	timestamp DOUBLE NOT NULL,
	data TEXT NOT NULL
);
CREATE INDEX events_by_attempt ON events (rollout_id, attempt_id, position);
CREATE TABLE models (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	model TEXT NOT NULL,
	endpoint TEXT NOT NULL,
	version INTEGER NOT NULL,
	protocol TEXT NOT NULL,
	UNIQUE (model, endpoint)
);
INSERT INTO longrein_schema VALUES (1);
INSERT INTO rollouts VALUES (1, 'r', 'g', 1, '{}', '{}', '{"phase":"train","step":0}', 'succeeded', NULL, '0', NULL, 2, 1.0, 2.0);
INSERT INTO terminal VALUES (1, 'r');
INSERT INTO attempts VALUES (1, 'r', '0', NULL, 1.0, 2.0, 'succeeded', 0, NULL, NULL);
INSERT INTO calls VALUES (
	'r', '0', 0, 'chat', 'train', 'm', 'policy', 'main', NULL, NULL, NULL, 0, X'01000000', 1, X'0700000008000000',
	X'000000BF000000BF', '[[3,2]]', 0, '[{"role":"user","content":"a"}]', NULL, '{"role":"assistant","content":"b"}', '{}',
	'ok', 'stop', 200, NULL, 1.0, 1.5, 2.0
);
INSERT INTO events VALUES (1, 'r', '0', 'reward', 2.0, '{"value":1.0}');
INSERT INTO models VALUES (1, 'm', 'http://a', 4, 'completions');
