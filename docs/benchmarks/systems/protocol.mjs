// The protocol of programs for Node; protocol.py specifies it.

import { openSync, writeSync } from "node:fs";
import { createInterface } from "node:readline";

export const FIELDS = [
  "recipient", "subject", "note", "reference", "language", "account", "amount", "share", "urgent", "sent",
];
const KEYS = 5000;
const SLEEP = 0.05;

export function emit(event, values = {}) {
  process.stdout.write(JSON.stringify({ event, ...values }) + "\n");
}

const now = () => (performance.timeOrigin + performance.now()) / 1000;
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export function payloads(number, first = 0, keys = KEYS) {
  const sent = now();
  return Array.from({ length: number }, (_, offset) => {
    const index = first + offset;
    return {
      recipient: `user${index}@example.com`,
      subject: "Your order is on its way",
      note: "left at the door, as agreed",
      reference: index.toString(16).padStart(32, "0"),
      language: "en",
      account: index % keys,
      amount: 1999,
      share: 0.25,
      urgent: false,
      sent,
    };
  });
}

// Records when handlers begin and end, as RunLog in protocol.py does; a record is written at once.
class RunLog {
  constructor(directory) {
    this.file = openSync(`${directory}/${process.pid}`, "w+");
    this.records = 0;
  }

  begin(key, reference) {
    const record = Buffer.alloc(32);
    record.writeBigInt64LE(BigInt(key), 0);
    record.writeBigInt64LE(BigInt(`0x${reference}`), 8);
    record.writeDoubleLE(Number(process.hrtime.bigint()) / 1e9, 16);
    const place = 32 * this.records;
    this.records += 1;
    writeSync(this.file, record, 0, 32, place);
    return place;
  }

  end(place) {
    const record = Buffer.alloc(8);
    record.writeDoubleLE(Number(process.hrtime.bigint()) / 1e9);
    writeSync(this.file, record, 0, 8, place + 24);
  }
}

class Meter {
  constructor({ handler = "read", sleep = SLEEP, report_every: reportEvery = 0.02, runs }, lines) {
    this.handler = handler;
    this.sleep = sleep;
    this.runs = runs ? new RunLog(runs) : null;
    this.reportEvery = reportEvery;
    this.lines = lines;
    this.jobs = 0;
    this.stamps = [];
  }

  read(payload) {
    let sent;
    for (const field of FIELDS) sent = payload[field];
    if (this.handler === "stamp") this.stamps.push([sent, now()]);
    this.jobs += 1;
  }

  // Only the handler that sleeps is asynchronous.
  handle(payload) {
    const place = this.runs?.begin(payload.account, payload.reference);
    if (this.handler === "sleep") return wait(this.sleep * 1000).then(() => this.end(payload, place));
    this.end(payload, place);
  }

  end(payload, place) {
    this.read(payload);
    this.runs?.end(place);
  }

  async waitForGo() {
    emit("ready");
    const line = await this.lines.next();
    if (line.done || line.value !== "go") process.exit(0);
    const cpu = process.cpuUsage();
    let told = 0;
    setInterval(() => {
      if (this.jobs !== told) {
        told = this.jobs;
        emit("count", { jobs: told, time: now(), stamps: this.takeStamps() });
      }
    }, this.reportEvery * 1000);
    this.lines.next().then(() => {
      const used = process.cpuUsage(cpu);
      emit("end", {
        jobs: this.jobs,
        cpu: (used.user + used.system) / 1e6,
        peak_kib: process.resourceUsage().maxRSS,
        stamps: this.takeStamps(),
      });
      process.stdout.write("", () => process.exit(0));
    });
  }

  takeStamps() {
    const taken = this.stamps;
    this.stamps = [];
    return taken;
  }
}

export async function main(adapter) {
  const [verb, text] = process.argv.slice(2);
  const options = JSON.parse(text);
  const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  if (verb === "prepare") {
    emit("prepared", await adapter.prepare(options));
    process.exit(0);
  } else if (verb === "enqueue") {
    await serveRequests(await adapter.open(options), lines);
    process.exit(0);
  } else if (verb === "work") {
    await adapter.work(options, new Meter(options, lines));
  } else {
    throw new Error(`unknown command: ${verb}`);
  }
}

async function serveRequests(enqueue, lines) {
  emit("ready");
  let first = 0;
  for (;;) {
    const { value, done } = await lines.next();
    if (done) return;
    const request = JSON.parse(value);
    const started = performance.now();
    for (let start = 0, number = 0; start < request.jobs; start += request.chunk, number += 1) {
      const late = started + number * (request.interval ?? 0) * 1000 - performance.now();
      if (late > 0) await wait(late);
      await enqueue(payloads(Math.min(request.chunk, request.jobs - start), first + start, request.keys), request);
    }
    first += request.jobs;
    emit("enqueued", { jobs: request.jobs, seconds: (performance.now() - started) / 1000 });
  }
}
