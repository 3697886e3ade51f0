// graphile-worker: a task by name, a payload of JSON. Of its jobs with the same queue name one runs at once, in order.

import { Logger, makeWorkerUtils, run } from "graphile-worker";
import pg from "pg";
import { readFile } from "node:fs/promises";
import { main } from "./protocol.mjs";

const quiet = new Logger(() => () => {});

async function versions() {
  const found = {};
  for (const name of ["graphile-worker", "pg"]) {
    const text = await readFile(new URL(`node_modules/${name}/package.json`, import.meta.url));
    found[name] = JSON.parse(text).version;
  }
  return { ...found, node: process.versions.node };
}

await main({
  async prepare({ url }) {
    const utils = await makeWorkerUtils({ connectionString: url, logger: quiet });
    await utils.migrate();
    await utils.release();
    return {
      remaining: "SELECT 1 FROM graphile_worker._private_jobs WHERE run_at <= now()",
      versions: await versions(),
      due: `SELECT count(*), extract(epoch FROM now() - min(run_at))
        FROM graphile_worker._private_jobs WHERE run_at <= now()`,
      // Finished jobs are deleted.
      lock: "SELECT 1 FROM graphile_worker._private_jobs ORDER BY priority, run_at, id LIMIT 1 FOR UPDATE",
    };
  },

  async open({ url, flow }) {
    const pgPool = new pg.Pool({ connectionString: url, max: 1 });
    const utils = await makeWorkerUtils({ pgPool, logger: quiet });
    return async (jobs, { way, priority, delay }) => {
      const runAt = delay ? new Date(Date.now() + delay * 1000) : undefined;
      if (way === "one") {
        for (const job of jobs) await utils.addJob("handle", job, { priority, runAt });
      } else {
        const queueOf = (job) => (flow ? String(job.account) : undefined);
        await utils.addJobs(
          jobs.map((payload) => ({ identifier: "handle", payload, priority, runAt, queueName: queueOf(payload) })),
        );
      }
    };
  },

  async work({ url, tuned, concurrency, local_queue: localQueue = true }, meter) {
    await meter.waitForGo();
    const best = {
      concurrentJobs: concurrency ?? 24,
      ...(localQueue ? { localQueue: { size: 2000 } } : {}),
      completeJobBatchDelay: 10,
      failJobBatchDelay: 10,
    };
    await run({
      preset: { worker: { connectionString: url, logger: quiet, ...(tuned ? best : {}) } },
      logger: quiet,
      taskList: { handle: (payload) => meter.handle(payload) },
    });
  },
});
