// Points of one curve: three columns sorted by step.

export class Points {
  readonly step: number[] = [];
  readonly time: number[] = [];
  readonly value: number[] = [];

  get length(): number {
    return this.step.length;
  }

  /** Insert a point, or replace the one of the same step: a rank was late, or a loaded checkpoint went back. */
  add(step: number, time: number, value: number): void {
    let at = this.length;
    while (at > 0 && this.step[at - 1]! >= step) at -= 1; // nearly always the end
    const replaced = this.step[at] === step ? 1 : 0;
    this.step.splice(at, replaced, step);
    this.time.splice(at, replaced, time);
    this.value.splice(at, replaced, value);
  }
}
